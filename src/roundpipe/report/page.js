"use strict";
// Draws the timeline: every stream a lane, memory below them, one canvas for all. Time runs from
// `view.from` to `view.to`, in ticks of 0.1 microseconds.
(() => {
  const canvas = document.getElementById("timeline");
  if (!canvas) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const reading = document.getElementById("reading");
  const pen = canvas.getContext("2d");
  const whole = Math.max(1, Math.round(data.seconds * 1e7));
  const view = { from: 0, to: whole };
  const TOP = 40, COMPUTE = 26, MOVE = 9, HOST = 14, MEMORY = 40, GAP = 3, HEAD = 21;
  const SHORTEST = 20; // ticks on the screen at the closest
  const FONT = "px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

  let left = 150, wide = 800, high = 0, scale = 1;
  let colours = {}, shown = null, showsCritical = false, waiting = false;

  // ---- where things lie

  const rows = []; // {place} | {lane} | {counter}, each with y and h
  function layOut() {
    rows.length = 0;
    let y = TOP;
    for (const place of data.places) {
      rows.push({ place, y, h: HEAD });
      y += HEAD;
      for (const lane of place.lanes) {
        const h = lane.computes ? COMPUTE : place.isHost ? HOST : MOVE;
        rows.push({ lane, y, h });
        y += h + GAP;
      }
      for (const counter of place.counters) {
        rows.push({ counter, y: y + GAP, h: MEMORY });
        y += MEMORY + 2 * GAP;
      }
      y += 6;
    }
    high = y;
  }

  function measure() {
    const box = canvas.parentElement.clientWidth - 2;
    scale = window.devicePixelRatio || 1;
    left = box < 600 ? 96 : 150;
    wide = Math.max(box - left, 40);
    canvas.style.height = `${high}px`;
    canvas.width = Math.round(box * scale);
    canvas.height = Math.round(high * scale);
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    colours = { op: {} };
    for (const name of ["ground", "line", "word", "faint", "lane", "accent", "memory", "limit"]) {
      colours[name] = of(name);
    }
    for (const [op, [, name]] of Object.entries(data.ops)) {
      colours.op[op] = of(name.replaceAll("_", "-"));
    }
    ask();
  }

  const x = (tick) => left + ((tick - view.from) / (view.to - view.from)) * wide;
  const tickAt = (px) => view.from + ((px - left) / wide) * (view.to - view.from);

  // The first of a sorted column that is at least `value`.
  function find(column, value) {
    let low = 0, top = column.length;
    while (low < top) {
      const middle = (low + top) >> 1;
      if (column[middle] < value) low = middle + 1;
      else top = middle;
    }
    return low;
  }

  // ---- words

  function time(ticks) {
    const s = ticks / 1e7, size = Math.abs(s);
    if (size >= 1 || s === 0) return `${round(s)} s`;
    return size >= 1e-3 ? `${round(s * 1e3)} ms` : `${round(s * 1e6)} µs`;
  }
  function round(value) {
    return String(Number(value.toPrecision(4)));
  }
  function bytes(value) {
    for (const [least, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (value >= least) return `${round(value / least)} ${unit}`;
    }
    return `${round(value)} B`;
  }
  function action(lane, i) {
    const microbatch = lane.microbatch[i] < 0 ? "" : `.${lane.microbatch[i]}`;
    const chunk = lane.chunk[i] < 0 ? "" : `#${lane.chunk[i]}`;
    return `${lane.op[i]}${lane.index[i]}${microbatch}${chunk}`;
  }
  function describe(place, lane, i) {
    const op = lane.op[i], step = data.steps[lane.step[i]];
    const what = "NSP".includes(op) ? data.layers[lane.index[i]] : step.visits[lane.index[i]];
    const parts = [`${action(lane, i)} · ${data.ops[op][0]}`, what];
    let which = `step ${step.step}`;
    if (lane.microbatch[i] >= 0) which += ` · microbatch ${lane.microbatch[i]}`;
    if (lane.chunk[i] >= 0) which += ` · chunk ${lane.chunk[i]}`;
    parts.push(which, `${place.name} · ${lane.name}`);
    parts.push(`${time(lane.end[i] - lane.start[i])} from ${time(lane.start[i])}`);
    return parts;
  }

  // ---- drawing

  function ask() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  }

  function draw() {
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.fillStyle = colours.ground;
    pen.fillRect(0, 0, left + wide, high);
    let drawn = 0;
    for (const row of rows) {
      if (row.place) continue;
      pen.fillStyle = colours.lane;
      pen.fillRect(left, row.y, wide, row.h);
    }
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, wide, high);
    pen.clip();
    drawTime();
    for (const row of rows) {
      if (row.lane) drawn += drawLane(row);
      else if (row.counter) drawCounter(row);
    }
    pen.restore();
    drawNames();
    canvas.dataset.drawn = drawn;
    canvas.dataset.lanes = rows.filter((row) => row.lane).length;
    canvas.dataset.seconds = (view.to - view.from) / 1e7;
  }

  function drawTime() {
    const rough = ((view.to - view.from) / wide) * 110;
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    pen.font = `11${FONT}`;
    pen.textAlign = "left";
    for (let at = Math.ceil(view.from / every) * every; at <= view.to; at += every) {
      pen.fillStyle = colours.line;
      pen.fillRect(Math.round(x(at)), 4, 1, high);
      pen.fillStyle = colours.faint;
      pen.fillText(time(Math.round(at)), x(at) + 4, 14);
    }
    let free = -1;
    for (const { step, start } of data.steps) {
      if (start < view.from || start > view.to) continue;
      const px = Math.round(x(start)), text = `step ${step}`;
      pen.fillStyle = colours.accent;
      pen.fillRect(px, 20, 1, 14);
      if (px < free) continue;
      pen.fillText(text, px + 4, 31);
      free = px + pen.measureText(text).width + 12;
    }
  }

  // Spans narrower than a pixel that lie on one already drawn add nothing and are passed over.
  function drawLane({ lane, y, h }) {
    const { start, end, op } = lane;
    const bright = new Set(showsCritical ? lane.critical : []);
    const labels = lane.computes && h >= 18;
    let covered = -1, count = 0;
    pen.textAlign = "center";
    pen.font = `11${FONT}`;
    for (let i = find(end, view.from); i < start.length && start[i] <= view.to; i++) {
      const a = x(start[i]), b = x(end[i]);
      count++;
      if (b <= covered && b - a < 1 && !bright.has(i)) continue;
      const size = Math.max(b - a, 0.8);
      const gap = size > 5 ? 0.6 : 0;
      pen.globalAlpha = showsCritical ? (bright.has(i) ? 1 : 0.22) : lane.step[i] % 2 ? 0.74 : 1;
      pen.fillStyle = colours.op[op[i]];
      pen.fillRect(a, y, size - gap, h);
      covered = a + size;
      if (isAkin(lane, i) && size > 1.5) {
        pen.globalAlpha = 1;
        pen.strokeStyle = colours.word;
        pen.lineWidth = shown.lane === lane && shown.i === i ? 2 : 1;
        pen.strokeRect(a + 0.5, y + 0.5, Math.max(size - gap - 1, 1), h - 1);
      }
      if (labels && size > 20) drawLabel(lane, i, Math.max(a, left), Math.min(b, left + wide), y, h);
    }
    pen.globalAlpha = 1;
    return count;
  }

  function drawLabel(lane, i, a, b, y, h) {
    const long = action(lane, i);
    const text = b - a > 7 * long.length + 6 ? long : String(lane.microbatch[i]);
    if (b - a < 7 * text.length + 4) return;
    pen.fillStyle = "#ffffff";
    pen.fillText(text, (a + b) / 2, y + h / 2 + 4);
  }

  // Of the same microbatch of the same step as what is pointed at.
  function isAkin(lane, i) {
    if (!shown) return false;
    if (shown.lane === lane && shown.i === i) return true;
    const microbatch = shown.lane.microbatch[shown.i];
    return (
      microbatch >= 0 &&
      lane.microbatch[i] === microbatch &&
      lane.step[i] === shown.lane.step[shown.i]
    );
  }

  function drawCounter({ counter, y, h }) {
    const top = Math.max(counter.limit || 0, ...counter.bytes, 1) * 1.08;
    const height = (value) => y + h - (value / top) * h;
    const { at, bytes: values } = counter;
    if (!at.length) return;
    pen.beginPath();
    pen.moveTo(x(at[0]), y + h);
    const first = Math.max(find(at, view.from) - 1, 0);
    let last = y + h;
    for (let i = first; i < at.length; i++) {
      pen.lineTo(x(at[i]), last);
      last = height(values[i]);
      pen.lineTo(x(at[i]), last);
      if (at[i] > view.to) break;
    }
    const end = Math.max(x(Math.max(whole, at.at(-1))), left);
    pen.lineTo(end, last);
    pen.lineTo(end, y + h);
    pen.closePath();
    pen.fillStyle = colours.memory;
    pen.globalAlpha = 0.45;
    pen.fill();
    pen.globalAlpha = 1;
    if (counter.limit) {
      pen.fillStyle = colours.limit;
      pen.fillRect(left, height(counter.limit), wide, 1);
    }
  }

  function drawNames() {
    pen.fillStyle = colours.ground;
    pen.fillRect(0, 0, left, high);
    pen.textAlign = "left";
    for (const row of rows) {
      if (row.place) {
        pen.font = `600 12${FONT}`;
        pen.fillStyle = colours.word;
        pen.fillText(row.place.name, 8, row.y + 14);
        continue;
      }
      const small = row.h < 12;
      pen.font = `${small ? 10 : 11}${FONT}`;
      pen.fillStyle = colours.faint;
      const middle = row.y + row.h / 2 + (small ? 3.5 : 4);
      pen.fillText((row.lane || row.counter).name, 16, middle, left - 22);
      if (row.counter && row.counter.bytes.length) {
        const peak = row.counter.bytes.reduce((a, b) => Math.max(a, b));
        pen.fillText(`most ${bytes(peak)}`, 16, middle + 13, left - 22);
      }
    }
  }

  // ---- moving

  function show(from, to) {
    const length = Math.min(Math.max(to - from, SHORTEST), whole);
    const middle = (from + to) / 2;
    view.from = Math.min(Math.max(middle - length / 2, 0), whole - length);
    view.to = view.from + length;
    ask();
  }
  function zoom(factor, around) {
    const at = around === undefined ? (view.from + view.to) / 2 : around;
    const length = (view.to - view.from) * factor;
    if (length < SHORTEST) return;
    const from = at - (at - view.from) * factor;
    show(from, from + length);
  }
  const pan = (share) => {
    const by = (view.to - view.from) * share;
    show(view.from + by, view.to + by);
  };

  function place(event) {
    const box = canvas.getBoundingClientRect();
    return { px: event.clientX - box.left - 1, py: event.clientY - box.top - 1 };
  }

  function pointed(px, py) {
    if (px < left) return null;
    let place = null;
    for (const row of rows) {
      if (row.place) place = row.place;
      else if (py >= row.y - 1 && py <= row.y + row.h + 1) return { ...row, place, at: tickAt(px) };
    }
    return null;
  }

  // The span under the pointer, or the nearest one within two pixels.
  function spanAt({ lane, at }) {
    const near = ((view.to - view.from) / wide) * 2;
    let best = -1, away = near;
    for (let i = find(lane.end, at - near); i < lane.start.length; i++) {
      if (lane.start[i] > at + near) break;
      const gap = Math.max(lane.start[i] - at, at - lane.end[i], 0);
      if (gap <= away) [best, away] = [i, gap];
      if (gap === 0) break;
    }
    return best;
  }

  function read(event) {
    const { px, py } = place(event);
    const row = pointed(px, py);
    let lines = null, found = null;
    if (row && row.lane) {
      const i = spanAt(row);
      if (i >= 0) {
        found = { lane: row.lane, i };
        lines = describe(row.place, row.lane, i);
      }
    } else if (row && row.counter) {
      const i = find(row.counter.at, row.at + 1) - 1;
      if (i >= 0) {
        lines = [`${bytes(row.counter.bytes[i])} at ${time(Math.round(row.at))}`];
        lines.push(`${row.place.name} · ${row.counter.name}`);
        if (row.counter.limit) lines.push(`limit ${bytes(row.counter.limit)}`);
      }
    }
    tip.hidden = !lines;
    if (lines) {
      tip.textContent = lines.join("\n");
      const room = canvas.parentElement.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(0, Math.min(px + 14, room))}px`;
      tip.style.top = `${py + 18}px`;
    }
    if ((found && found.i) !== (shown && shown.i) || (found && found.lane) !== (shown && shown.lane)) {
      shown = found;
      ask();
    }
  }

  function forget() {
    tip.hidden = true;
    if (shown) {
      shown = null;
      ask();
    }
  }

  const held = new Map(); // pointers that are down, and where
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, event.clientX);
    canvas.classList.add("held");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) {
      read(event);
      return;
    }
    tip.hidden = true;
    const before = [...held.values()];
    held.set(event.pointerId, event.clientX);
    const after = [...held.values()];
    if (held.size === 1) {
      const by = ((before[0] - after[0]) / wide) * (view.to - view.from);
      show(view.from + by, view.to + by);
    } else if (held.size === 2 && after[0] !== after[1]) {
      const box = canvas.getBoundingClientRect();
      const middle = (after[0] + after[1]) / 2 - box.left;
      zoom(Math.abs((before[0] - before[1]) / (after[0] - after[1])), tickAt(middle));
    }
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      held.delete(event.pointerId);
      if (!held.size) canvas.classList.remove("held");
    });
  }
  canvas.addEventListener("pointerleave", forget);
  canvas.addEventListener("dblclick", (event) => zoom(0.5, tickAt(place(event).px)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        const by = event.deltaY * (event.deltaMode === 1 ? 20 : 1); // lines, or pixels
        zoom(Math.exp(Math.max(-60, Math.min(60, by)) * 0.008), tickAt(place(event).px));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        pan((event.deltaX || event.deltaY) / wide);
      }
    },
    { passive: false },
  );
  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "w": () => zoom(0.6), "ArrowUp": () => zoom(0.6),
    "-": () => zoom(1 / 0.6), "s": () => zoom(1 / 0.6), "ArrowDown": () => zoom(1 / 0.6),
    "ArrowLeft": () => pan(-0.2), "a": () => pan(-0.2),
    "ArrowRight": () => pan(0.2), "d": () => pan(0.2),
    "0": () => show(0, whole), "Home": () => show(0, whole),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
    reading.textContent = `${time(view.from)} to ${time(view.to)}`;
  });
  const press = (id, act) => {
    const button = document.getElementById(id);
    if (button) button.addEventListener("click", () => act(button));
  };
  press("closer", () => zoom(0.6));
  press("farther", () => zoom(1 / 0.6));
  press("all", () => show(0, whole));
  press("critical", (button) => {
    showsCritical = !showsCritical;
    button.setAttribute("aria-pressed", String(showsCritical));
    ask();
  });

  layOut();
  measure();
  new ResizeObserver(measure).observe(canvas.parentElement);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", measure);
})();
