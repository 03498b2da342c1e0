"""Scripts written after the published library's documentation run as they are, with right numbers.

Each is run as a user would run it; what it leaves in its variables is compared with plain PyTorch.
"""

from __future__ import annotations

import copy
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from roundpipe import RoundPipe

SCRIPTS = Path(__file__).parent / "scripts"
# peft asks for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(tmp_path, monkeypatch, bits_of_torch):
    """``run("name")``: the variables that a script leaves behind."""
    monkeypatch.chdir(tmp_path)
    kept = []

    def of(name):
        kept.append(runpy.run_path(str(SCRIPTS / f"{name}.py")))
        return kept[-1]

    yield of
    for value in (value for variables in kept for value in variables.values()):
        if isinstance(value, RoundPipe):
            value.close()


def tower(width=16, ends=(8, 3)):
    """What the scripts begin with, drawn anew."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(ends[0], width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, ends[1]),
    )  # fmt: skip


def gradients_of(model, loss):
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(found, expected, **how):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name, **how)


def test_every_script_is_run_by_a_test():
    text = Path(__file__).read_text()
    assert [p.stem for p in SCRIPTS.glob("*.py") if f'run("{p.stem}")' not in text] == []


def test_the_shortest_loop_trains_as_the_plain_loop(run):
    found = run("shortest_loop")
    torch.manual_seed(0)
    torch.randn(16, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), found["Distance"]())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for points, loss in zip(found["points"].chunk(2), found["losses"], strict=True):
        expected = model(points)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, expected.detach())
    assert_close(found["weights"], model.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_model_that_is_no_chain_trains_by_the_callers_own_backward(run):
    found = run("classic_loop")
    torch.manual_seed(0)
    model = found["Branching"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for inputs, labels in found["data"]:
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert found["is_auto"]
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert_close(found["checkpoint"], model.state_dict(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["outputs"], model(found["data"][0][0]).detach())


def test_a_loop_with_steps_by_a_function_trains_as_the_plain_loop(run):
    found = run("sequential_loop")
    model, losses = tower(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    correct = []
    for _ in range(2):
        for images, labels in found["data"]:
            total = torch.zeros(())
            for x, y in zip(images.chunk(4), labels.chunk(4), strict=True):
                loss = cross_entropy(model(x), y) / 4
                loss.backward()
                total += loss.detach()
            losses.append(total.item())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            hits = [(model(x).argmax(1) == y).sum().item() for x, y in found["data"]]
        correct.append(sum(hits))
    assert found["losses"] == pytest.approx(losses)
    assert found["correct"] == correct
    assert found["outputs"].shape == (12, 3)
    assert_close(found["weights"], model.state_dict())


def test_a_scaler_of_the_callers_skips_and_grows_as_torchs(run):
    found = run("grad_scaler")
    model = tower().half()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-2, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
    losses, scales = [], []
    for images, labels in found["data"]:
        sums, total = [0.0] * len(masters), torch.zeros(())
        for x, y in zip(images.chunk(3), labels.chunk(3), strict=True):
            loss = scaler.scale(cross_entropy(model(x).float(), y)) / 3
            for at, grad in enumerate(torch.autograd.grad(loss, list(model.parameters()))):
                sums[at] = sums[at] + grad.float()
            total += loss.detach()
        losses.append(total.item() / scaler.get_scale())
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad.half().float()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(masters, 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        with torch.no_grad():
            for working, master in zip(model.parameters(), masters, strict=True):
                working.copy_(master)
    assert found["losses"] == losses
    assert found["scales"] == scales
    assert scales[0] == 2.0**21  # it overflowed
    assert any(after > before for before, after in pairwise(scales))  # and grew
    assert found["factors"] == (2.0, 0.5, 2)
    assert_close(found["weights"], model.state_dict(), rtol=0, atol=0)


def test_late_steps_by_a_function_are_the_delayed_recurrence(run):
    found = run("late_steps")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    losses = []
    for images, labels in found["data"]:
        sums, total = [0.0] * len(masters), torch.zeros(())
        for x, y in zip(images.chunk(2), labels.chunk(2), strict=True):
            loss = cross_entropy(model(x).float(), y) / 2
            for at, grad in enumerate(torch.autograd.grad(loss, list(model.parameters()))):
                sums[at] = sums[at] + grad.float()
            total += loss.detach()
        losses.append(total.item())
        with torch.no_grad():  # the call after this one reads what was newest before the step
            for working, master in zip(model.parameters(), masters, strict=True):
                working.copy_(master)
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad.bfloat16().float()
        optimizer.step()
    assert found["losses"] == losses
    for name in ("weights", "checkpoint"):
        for ours, master in zip(found[name].values(), masters, strict=True):
            assert torch.equal(ours, master.detach().bfloat16()), name


def test_inputs_and_labels_are_cut_and_outputs_joined_as_told(run):
    found = run("splitting")
    model = found["Masked"]()
    model.load_state_dict(found["model"].state_dict())
    for name in found["configs"]:
        shift = None if name == "half a spec" else found["shift"]
        output = model(found["images"], found["masks"], scale=found["scale"], shift=shift)
        loss = found["loss_fn"](output, (found["targets"], found["weights_of"]))
        torch.testing.assert_close(found["losses"][name], loss.detach())
        assert_close(found["gradients"][name], gradients_of(model, loss))
        ours, hidden = found["outputs"][name], output["hidden"].detach()
        if name == "functions":
            torch.testing.assert_close(ours, hidden)
        elif name == "unmerged":
            torch.testing.assert_close(torch.cat(ours["hidden"]), hidden)
            assert list(ours["kind"]) == ["masked"] * 3
        else:
            torch.testing.assert_close(ours["hidden"], hidden)
            share = 1 if name == "specs" else 3  # reduced by a sum; else averaged
            torch.testing.assert_close(ours["rows"], output["rows"].detach() / share)


def test_plans_by_hand_and_balanced_ones_train_both_ways(run):
    found = run("execute_plan")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    loss = found["loss_fn"](model(found["data"]), found["labels"])
    expected = gradients_of(model, loss)
    assert len(found["losses"]) == 4
    for ours, gradients in zip(found["losses"], found["gradients"], strict=True):
        torch.testing.assert_close(ours, loss.detach())
        assert_close(gradients, expected)
    torch.testing.assert_close(found["evaluated"], model(found["data"]).detach())


def test_two_models_train_in_one_graph(run):
    found = run("two_models")
    torch.manual_seed(0)
    first = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    second = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-2)
    x, y, losses = found["data1"], found["labels"], []
    for loss_of in (
        lambda: found["loss_fn"](second(first(x)), y),
        lambda: (second(first(x)) - y).square().mean(),
        lambda: found["loss_fn"](second(torch.relu(first(x))), y),
    ):
        loss = loss_of()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert found["losses"] == pytest.approx(losses)
    assert_close(found["weights"][0], first.state_dict())
    assert_close(found["weights"][1], second.state_dict())


def test_several_losses_come_back_each_and_are_all_trained_on(run):
    found = run("several_losses")
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    outputs = model(x)
    losses = [(outputs - y).square().sum(), outputs.abs().sum()]
    assert isinstance(found["losses"], list)
    torch.testing.assert_close(found["losses"], [each.detach() for each in losses])
    assert_close(found["gradients"], gradients_of(model, sum(losses)))
    torch.testing.assert_close(found["outputs"], outputs.detach())
    own = found["WithLoss"]()
    own.load_state_dict(found["own"].state_dict())
    expected = own(x, y)
    torch.testing.assert_close(found["own_losses"], [each.detach() for each in expected])
    assert_close(found["own_gradients"], gradients_of(own, sum(expected)))


def test_attributes_are_the_models_own(run):
    found = run("attributes")
    assert found["read"] == ("net", "net of 4", True, True)
    assert torch.equal(found["thrice"], 3 * found["once"])
    assert found["written"] == (3.0, "mine")
    assert found["deleted"]
    assert found["names"] == ["first.weight", "first.bias"]
    assert found["state"].keys() == found["net"].state_dict().keys()
    assert torch.equal(found["net"].first.bias, found["state"]["first.bias"] + 1)
    assert found["vocab_size"] == 7
    assert found["original"].vocab_size == 8
    assert not hasattr(found["net"], "vocab_size")


def test_every_field_of_a_run_config_is_understood(run):
    found = run("run_config")
    assert not found["without"].requires_grad
    assert found["within"].requires_grad  # as the model's own config says
    plain = copy.deepcopy(found["my_model"]).eval()
    torch.testing.assert_close(found["many"].detach(), plain(found["x"]).detach())
    assert found["loss"].dim() == 0


def test_what_forward_decided_is_repeated_in_recompute(run):
    found = run("recompute_data")
    torch.manual_seed(0)
    model = nn.Sequential(*[found["Experts"]() for _ in range(3)])
    for layer in model:
        layer.forward = plain_forward.__get__(layer)
    loss = (model(found["data"]) - found["labels"]).square().sum()
    torch.testing.assert_close(found["loss"], loss.detach())
    assert_close(found["gradients"], gradients_of(model, loss))
    assert len(found["decided"]) >= 6  # by each layer for each microbatch, in forward alone
    assert not found["is_recomputing"]


def plain_forward(self, x):
    scores = self.router(x).softmax(-1)
    chosen = scores.topk(2, dim=-1).indices
    mixed = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        weight = scores[:, number : number + 1] * (chosen == number).any(-1, keepdim=True)
        mixed = mixed + weight * expert(x)
    return x + mixed


def test_adapters_of_peft_train_as_without_us(run):
    found = run("lora")
    from peft import get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM(found["base"].config), found["lora"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for ids in found["batches"]:
        total = 0.0
        for part in ids.chunk(2):
            loss = model(input_ids=part, labels=part, use_cache=False).loss / 2
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["num_masters"] == 12
    expected = {name: w for name, w in model.state_dict().items() if "lora_" in name}
    assert_close(found["weights"], expected, rtol=1e-4, atol=1e-6)


def test_a_causal_lm_in_fp16_trains_decodes_and_is_saved(run, tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # whose thread would stay
    found = run("causal_lm")

    assert all(loss == pytest.approx(4.2, abs=0.4) for loss in found["losses"])
    assert found["before"].shape == found["after"].shape == (1, 7)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / found["FOLDER"], dtype=torch.float16)
    state = found["model"].state_dict()
    assert_close(loaded.state_dict(), state, rtol=0, atol=0)
    assert found["losses"][-1] != found["losses"][0]


def test_a_network_with_batch_norm_learns_and_keeps_its_statistics(run):
    found = run("resnet")
    assert found["train_losses"][-1] < found["train_losses"][0]
    assert found["test_losses"][-1] < 1.7
    counted = [b for n, b in found["statistics"].items() if n.endswith("num_batches_tracked")]
    assert {int(count) for count in counted} == {3 * 3 * 8}  # of epochs, batches, microbatches
