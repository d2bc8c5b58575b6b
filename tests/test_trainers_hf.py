"""CutTrainer against Transformers' own Trainer on the uncut batch: parameters, logs, predictions and metrics."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from batchsplit import BatchCutter, CutError, label_weight

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from batchsplit.trainers.hf import CutTrainer, CutTrainerMixin

VOCAB, WIDTH, CLASSES = 30, 8, 3


# Models: every way there is of treating num_items_in_batch


def gpt2() -> nn.Module:
    """Divides by the count that it is given."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=WIDTH, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=WIDTH,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def _bert(**kwargs: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=CLASSES,
        max_position_embeddings=WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **kwargs,
    )  # fmt: skip


def classifier() -> nn.Module:
    """Takes the count among other keywords, and ignores it: a mean over rows."""
    return BertForSequenceClassification(_bert()).double()


def tagger() -> nn.Module:
    """Takes the count and ignores it: a mean over labelled tokens."""
    return BertForTokenClassification(_bert()).double()


class Plain(nn.Module):
    """Refuses the count: a mean over labelled tokens, after the causal shift where `shifted`."""

    def __init__(self, shifted: bool = False) -> None:
        super().__init__()
        self.shifted = shifted
        self.embed = nn.Embedding(VOCAB, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCAB)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.embed(input_ids).cumsum(1)))
        return {"logits": logits} if labels is None else {"loss": token_mean(logits, labels, self.shifted), "logits": logits}


class Swallowing(Plain):
    """Accepts any keyword, and ignores them all."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask, labels)


class Dividing(Plain):
    """Divides a sum over all labels by the count."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, attention_mask, labels)
        if labels is not None:
            out["loss"] = token_mean(out["logits"], labels, False, kwargs.get("num_items_in_batch"))
        return out


def token_mean(logits: Tensor, labels: Tensor, shifted: bool, count: Any = None) -> Tensor:
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="mean" if count is None else "sum")
    return loss if count is None else loss / count


def divides(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return token_mean(outputs["logits"], labels, True, num_items_in_batch)


def ignores(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return token_mean(outputs["logits"], labels, True)


# Data: ragged, padded to one width, with labels of -100


def rows(n: int, kind: str = "tokens", empty: tuple[int, ...] = ()) -> list[dict[str, Tensor]]:
    """Rows of 2 to 8 tokens; those in `empty` without a label."""
    data = []
    for i in range(n):
        length = int(torch.randint(2, WIDTH + 1, ()))
        mask = (torch.arange(WIDTH) < length).long()
        ids = torch.randint(3, VOCAB, (WIDTH,)) * mask
        top = CLASSES if kind == "tags" else VOCAB
        labels = torch.where((mask == 1) & (i not in empty), ids % top, -100)
        if kind == "classes":
            labels = ids[0] % CLASSES
        data.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return data


class Run:
    """A training, and what came of it."""

    def __init__(self, trainer: Trainer, eval_data: Any = None) -> None:
        self.trainer = trainer
        self.start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        self.parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        self.logs = [{k: log[k] for k in ("loss", "grad_norm") if k in log} for log in trainer.state.log_history if "loss" in log]
        self.flos, self.tokens = trainer.state.total_flos, trainer.state.num_input_tokens_seen
        self.evaluated = trainer.evaluate(eval_data)["eval_loss"] if eval_data is not None else None
        self.predicted = trainer.predict(eval_data) if eval_data is not None else None


def settings(path: Any, **changes: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 6, "per_device_eval_batch_size": 6, "max_steps": 3, "learning_rate": 0.5, "optim": "sgd",
        "logging_steps": 1, "logging_nan_inf_filter": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "lr_scheduler_type": "constant", "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    return TrainingArguments(str(path), **{**given, **changes})


def pair(
    path: Any, model: nn.Module, data: Any, cutter: BatchCutter, eval_data: Any = None, base: Any = Trainer, mixed: Any = None,
    trainer: dict[str, Any] | None = None, **changes: Any,
) -> tuple[Run, Run]:  # fmt: skip
    """The same training uncut and cut."""
    mixed = mixed or type("Cutting", (CutTrainerMixin, base), {})
    first = base(copy.deepcopy(model), settings(path, **changes), train_dataset=data, **(trainer or {}))
    whole = Run(first, eval_data)
    second = mixed(model, settings(path, **changes), train_dataset=data, cutter=cutter, **(trainer or {}))
    return whole, Run(second, eval_data)


def apart(cut: Run, whole: Run) -> float:
    """How far two trainings ended from one another, by how far they went."""
    return distance(cut.parameters, whole.parameters) / distance(whole.parameters, whole.start)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.stack([(a[name].double() - b[name].double()).norm() for name in b]).norm())


def assert_same(whole: Run, cut: Run, within: float = 1e-12) -> None:
    assert cut.trainer.state.global_step == whole.trainer.state.global_step == 3
    assert apart(cut, whole) <= within
    logged = max(within, 1e-6)  # the Trainer adds losses up in float32
    assert len(cut.logs) == len(whole.logs) > 0
    for a, b in zip(cut.logs, whole.logs, strict=True):
        assert a == pytest.approx(b, rel=logged)
    assert (cut.flos, cut.tokens) == (whole.flos, whole.tokens)
    if whole.predicted is not None:
        assert cut.evaluated == pytest.approx(whole.evaluated, rel=logged)
        assert cut.predicted is not None
        for name in ("predictions", "label_ids"):
            a, b = getattr(cut.predicted, name), getattr(whole.predicted, name)
            assert (abs(a - b) <= max(within, 1e-12) * abs(b).max()).all()


KINDS: dict[str, tuple[Callable[[], nn.Module], str, BatchCutter, dict[str, Any]]] = {
    "gpt2": (gpt2, "tokens", BatchCutter(rows=4), {}),
    "llama": (llama, "tokens", BatchCutter(rows=1), {}),
    "classifier": (classifier, "classes", BatchCutter(rows=4, sizes="full"), {}),
    "tagger": (tagger, "tags", BatchCutter(area=3 * WIDTH), {}),
    "swallowing": (
        lambda: Swallowing(shifted=True), "tokens", BatchCutter(parts=4, weight=label_weight("labels", shifted=True)), {},
    ),
    "refusing": (lambda: Plain(shifted=True), "tokens", BatchCutter(rows=2, weight=label_weight("labels", shifted=True)), {}),
    "dividing": (Dividing, "tokens", BatchCutter(rows=2), {}),
    "dividing, said": (Dividing, "tokens", BatchCutter(rows=2, weight=None), {}),
    "dividing, weighed": (Dividing, "tokens", BatchCutter(rows=2, weight=label_weight("labels")), {}),
    "loss function divides": (gpt2, "tokens", BatchCutter(rows=2), {"compute_loss_func": divides}),
    "loss function ignores": (
        gpt2, "tokens", BatchCutter(rows=2, weight=label_weight("labels", shifted=True)), {"compute_loss_func": ignores},
    ),
}  # fmt: skip


GROUPED = ("gpt2", "tagger", "refusing", "swallowing")


@pytest.mark.parametrize(("kind", "every"), [*((kind, 1) for kind in KINDS), *((kind, 3) for kind in GROUPED)])
def test_cut_training_is_uncut_training(kind: str, every: int, tmp_path: Any) -> None:
    """With `every=3`: batches of 6, 6, 6 and then of 3 alone, twice over."""
    model, labels, cutter, more = KINDS[kind]
    data, held_out = rows(21 if every == 3 else 15, labels), rows(9, labels)
    whole, cut = pair(
        tmp_path, model(), data, cutter, held_out, trainer=more, gradient_accumulation_steps=every, max_grad_norm=0.5
    )
    assert_same(whole, cut)


@pytest.mark.parametrize("kind", ["gpt2", "tagger"])
def test_label_smoothing(kind: str, tmp_path: Any) -> None:
    model, labels, cutter, _ = KINDS[kind]
    whole, cut = pair(tmp_path, model(), rows(21, labels), cutter, rows(9, labels), label_smoothing_factor=0.1)
    assert_same(whole, cut)


class Configured(Plain):
    """Refuses the count, and has a config, without which the Trainer smoothes no labels."""

    config = None


def test_label_smoothing_of_a_model_that_refuses_the_count(tmp_path: Any) -> None:
    whole, cut = pair(
        tmp_path, Configured(), rows(21), BatchCutter(rows=2), rows(9), label_smoothing_factor=0.1,
        gradient_accumulation_steps=3,
    )  # fmt: skip
    assert_same(whole, cut, within=1e-7)  # the Trainer's smoother adds up in float32


class OwnLoss:
    """A loss of the user's own, which pops what it needs and calls nobody else's."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = token_mean(outputs["logits"], labels, False)
        return (loss, outputs) if return_outputs else loss


def test_a_subclass_with_a_loss_of_its_own(tmp_path: Any) -> None:
    whole, cut = pair(
        tmp_path, Swallowing(), rows(15), BatchCutter(rows=2, weight=label_weight("labels")), rows(9),
        base=type("Own", (OwnLoss, Trainer), {}), mixed=type("OwnCut", (OwnLoss, CutTrainer), {}),
    )  # fmt: skip
    assert_same(whole, cut)


def test_gradient_checkpointing_and_adamw(tmp_path: Any) -> None:
    whole, cut = pair(
        tmp_path, llama(), rows(15), BatchCutter(rows=4), rows(9), gradient_checkpointing=True, optim="adamw_torch",
        learning_rate=1e-3,
    )  # fmt: skip
    assert_same(whole, cut)


def test_rows_without_a_label(tmp_path: Any) -> None:
    """Sub-batches of one row whose labels are all ignored, first, last and in the middle: their mean is 0/0."""
    data, held_out = rows(6, empty=(0, 3, 4, 5)), rows(6, empty=(0, 5))
    whole, cut = pair(tmp_path, Swallowing(), data, BatchCutter(rows=1, weight=label_weight("labels")), held_out)
    assert_same(whole, cut)


def test_no_labels_at_all(tmp_path: Any) -> None:
    data = rows(6, empty=tuple(range(6)))
    weighed = BatchCutter(rows=2, weight=label_weight("labels"))
    for model, cutter in ((Dividing(), BatchCutter(rows=2)), (Plain(), weighed), (Swallowing(), weighed)):
        before = copy.deepcopy(model.state_dict())
        trainer = CutTrainer(model, settings(tmp_path), train_dataset=data, cutter=cutter)
        with pytest.raises(CutError, match="nothing to step on|can't be seen"):
            trainer.train()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


def test_evaluating_without_a_label(tmp_path: Any) -> None:
    data = rows(9)
    trainers = [
        Trainer(Plain(), settings(tmp_path)),
        CutTrainer(Plain(), settings(tmp_path), cutter=BatchCutter(rows=4, weight=label_weight("labels"))),
    ]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    unlabelled = [{k: v for k, v in row.items() if k != "labels"} for row in data]
    whole, cut = (trainer.predict(unlabelled) for trainer in trainers)  # type: ignore[arg-type]
    assert abs(whole.predictions - cut.predictions).max() <= 1e-12
    assert cut.label_ids is None
    ignored = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in data]
    losses = [trainer.evaluate(ignored)["eval_loss"] for trainer in trainers]  # type: ignore[arg-type]
    assert losses == pytest.approx([float("nan")] * 2, nan_ok=True)


def test_evaluation_before_any_training_and_of_the_loss_only(tmp_path: Any) -> None:
    data, model = rows(9), gpt2()
    losses = [
        trainer.evaluate(data)["eval_loss"]  # type: ignore[arg-type]
        for trainer in (
            Trainer(model, settings(tmp_path, prediction_loss_only=True)),  # type: ignore[arg-type]
            CutTrainer(model, settings(tmp_path, prediction_loss_only=True), cutter=BatchCutter(rows=4)),
        )
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_resumed_in_the_middle_of_an_epoch(tmp_path: Any) -> None:
    """Bit for bit, dropout included: what is asked of the loss draws nothing from the run's random numbers."""
    model = LlamaForCausalLM(LlamaConfig(**{**llama().config.to_dict(), "attention_dropout": 0.3})).double()
    data = rows(15)

    def run(path: Any, resume: bool = False) -> CutTrainer:
        args = settings(path, save_strategy="steps", save_steps=2)
        trainer = CutTrainer(copy.deepcopy(model), args, train_dataset=data, cutter=BatchCutter(rows=2))
        trainer.train(resume_from_checkpoint=str(path / "checkpoint-2") if resume else None)
        return trainer

    undisturbed, resumed = run(tmp_path), run(tmp_path, resume=True)
    assert resumed.state.global_step == 3
    assert resumed.state.epoch == undisturbed.state.epoch == 1
    for a, b in zip(undisturbed.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def trained_gradient(trainer: Any) -> dict[str, Tensor]:
    """What the optimizer is given in the first step."""
    found: dict[str, Tensor] = {}

    def step(*args: Any, **kwargs: Any) -> None:
        if not found:
            found.update({name: p.grad.double() for name, p in trainer.model.named_parameters() if p.grad is not None})

    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(step)
    trainer.train()
    return found


@pytest.mark.parametrize("precision", ["autocast", "parameters"])
@pytest.mark.parametrize("kind", ["gpt2", "tagger"])
def test_bfloat16_is_no_further_from_the_truth(kind: str, precision: str, tmp_path: Any) -> None:
    make, labels, _, _ = KINDS[kind]
    model = make().bfloat16().double()  # the same values in either precision
    data, size = rows(32, labels), {"per_device_train_batch_size": 32, "max_steps": 1, "max_grad_norm": 0}
    short = {"bf16": True} if precision == "autocast" else {}
    low = copy.deepcopy(model).float() if short else copy.deepcopy(model).bfloat16()
    truth = trained_gradient(Trainer(model, settings(tmp_path, **size), train_dataset=data))  # type: ignore[arg-type]
    args = settings(tmp_path, **size, **short)
    whole = trained_gradient(Trainer(copy.deepcopy(low), args, train_dataset=data))  # type: ignore[arg-type]
    cut = trained_gradient(CutTrainer(low, args, train_dataset=data, cutter=BatchCutter(rows=4)))
    assert distance(whole, truth) > 0
    assert distance(cut, truth) <= 1.25 * distance(whole, truth)


# When gradients may be reduced


@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_held_back_until_the_last_sub_batch(each: bool, tmp_path: Any) -> None:
    """Under a `no_sync` like FSDP2's, which turns the reduction on when it ends, whatever it was before."""
    synced, seen = [True], []

    @contextmanager
    def no_sync(model: Any) -> Iterator[None]:
        synced[0] = False
        yield
        synced[0] = True

    model = Dividing()
    model.register_forward_pre_hook(lambda module, args: seen.append(synced[0]) if module.training else None)
    args = settings(
        tmp_path, gradient_accumulation_steps=3, max_steps=2,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}} if each else None,
    )  # fmt: skip
    trainer = CutTrainer(model, args, train_dataset=rows(21), cutter=BatchCutter(parts=3))
    trainer.accelerator.no_sync = no_sync  # type: ignore[method-assign]
    trainer.train()
    assert seen == ([True] * 12 if each else [*[False] * 8, True, False, False, True])


def test_ranks_of_a_sharded_model_run_alike(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sub-batch takes part in the forwards, one without labels too; other numbers of them are an error on all."""
    data, calls = rows(6, empty=(0, 3, 4, 5)), []
    cutter = BatchCutter(rows=1, weight=label_weight("labels"))
    whole = Run(Trainer(model := Swallowing(), settings(tmp_path), train_dataset=data))
    model.load_state_dict(whole.start)
    monkeypatch.setattr("batchsplit.trainers.hf.shards", lambda trainer: True)
    model.register_forward_pre_hook(lambda module, args: calls.append(1) if module.training else None)
    cut = Run(CutTrainer(model, settings(tmp_path), train_dataset=data, cutter=cutter))
    assert_same(whole, cut)
    assert len(calls) == 3 * 6
    monkeypatch.setattr("batchsplit.trainers.hf_limits.shards", lambda trainer: True)
    cut.trainer.accelerator.gather = lambda mine: torch.cat([mine, mine + 1])  # type: ignore[method-assign]
    with pytest.raises(CutError, match=r"into \[6, 7\] sub-batches: forwards are the ranks' together"):
        cut.trainer.train()


# Planted wrong cases: the tests above would notice


class Naive(Trainer):
    """The loop that everybody writes first."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        subs = BatchCutter(parts=3).cut(inputs)
        return torch.stack([super(Naive, self).training_step(model, sub.data, num_items_in_batch) for sub in subs]).sum()


class Wrong(CutTrainer):
    """Shares on top of the count."""

    def _ask(self, model: Any, inputs: Any, count: Any) -> bool:
        return False


def test_b28_the_naive_loop_depends_on_the_model(tmp_path: Any) -> None:
    """Exact where the model divides by the count; the sum of three means where it does not, with no error."""
    runs = {}
    for make in (Dividing, Swallowing):
        model, data = make(), rows(6)
        runs[make] = pair(tmp_path, model, data, BatchCutter(rows=None), mixed=None, base=Trainer, max_grad_norm=0)[0]
        model.load_state_dict(runs[make].start)
        naive = Run(Naive(model, settings(tmp_path, max_grad_norm=0), train_dataset=data))
        ratio = naive.logs[0]["loss"] / runs[make].logs[0]["loss"]
        if make is Dividing:
            assert_same(runs[make], naive)
        else:
            assert ratio == pytest.approx(3, rel=0.2)
            assert apart(naive, runs[make]) > 0.1


def test_b29_shares_on_top_of_the_count_are_noticed(tmp_path: Any) -> None:
    whole, cut = pair(
        tmp_path, Dividing(), rows(15), BatchCutter(parts=4, weight=label_weight("labels")), mixed=Wrong, max_grad_norm=0
    )
    assert cut.logs[0]["loss"] == pytest.approx(whole.logs[0]["loss"] / 4, rel=0.2)
    assert apart(cut, whole) > 0.1
