// The order of search results: guides and questions come before decisions, records and changes.
// The numbers below `score` are Sphinx's own.
var Scorer = {
  score: ([docname, , , , score]) => {
    if (/^docs\/(design|runs)\/|^docs\/(acceptance|log|architectures|benchmarks)$/.test(docname)) return score - 20;
    if (/^(CHANGELOG|CONTRIBUTING|benchmarks\/)/.test(docname)) return score - 20;
    return docname === "docs/faq" ? score + 1 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
