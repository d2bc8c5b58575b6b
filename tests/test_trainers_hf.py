"""CutTrainer against Transformers' own Trainer on the uncut batch: parameters, logs, predictions and metrics."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import copy
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F

from batchsplit import BatchCutter, CutError, label_weight

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.utils import DistributedType
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from batchsplit.trainers import hf_limits
from batchsplit.trainers.hf import CutTrainer, CutTrainerMixin

VOCAB, WIDTH, CLASSES = 30, 8, 3
SHIFTED, UNSHIFTED = label_weight("labels", shifted=True), label_weight("labels")


# Models: every way there is of treating num_items_in_batch


def gpt2() -> Any:
    """Divides by the count that it is given."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=WIDTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).double()


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=WIDTH,
    )
    return LlamaForCausalLM(config).double()


def _bert() -> Any:
    return BertConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        id2label={i: str(i) for i in range(CLASSES)},
        max_position_embeddings=WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


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
        return (
            {"logits": logits}
            if labels is None
            else {"loss": token_mean(logits, labels, self.shifted), "logits": logits}
        )


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


def rows(n: int, kind: str = "tokens", empty: tuple[int, ...] = (), lengths: Any = None) -> Any:
    """Rows of 2 to 8 tokens; those in `empty` without a label."""
    data = []
    for i in range(n):
        length = lengths[i] if lengths else int(torch.randint(2, WIDTH + 1, ()))
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

    def __init__(self, trainer: Any, eval_data: Any = None) -> None:
        self.trainer = trainer
        self.start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        self.parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        logged = [log for log in trainer.state.log_history if "loss" in log]
        self.logs = [{name: log[name] for name in ("loss", "grad_norm") if name in log} for log in logged]
        self.flos, self.tokens = trainer.state.total_flos, trainer.state.num_input_tokens_seen
        self.evaluated = trainer.evaluate(eval_data)["eval_loss"] if eval_data is not None else None
        self.predicted = trainer.predict(eval_data) if eval_data is not None else None


def settings(path: Any, **changes: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 6,
        "per_device_eval_batch_size": 6,
        "max_steps": 3,
        "learning_rate": 0.5,
        "optim": "sgd",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "lr_scheduler_type": "constant",
        "include_num_input_tokens_seen": "all",
    }
    return TrainingArguments(str(path), **{**given, **changes})


def pair(
    path: Any,
    model: nn.Module,
    data: Any,
    cutter: BatchCutter,
    eval_data: Any = None,
    base: Any = Trainer,
    mixed: Any = None,
    trainer: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Run, Run]:
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
        lambda: Swallowing(shifted=True),
        "tokens",
        BatchCutter(parts=4, weight=SHIFTED),
        {},
    ),
    "refusing": (
        lambda: Plain(shifted=True),
        "tokens",
        BatchCutter(rows=2, weight=SHIFTED),
        {},
    ),
    "dividing": (Dividing, "tokens", BatchCutter(rows=2), {}),
    "dividing, said": (Dividing, "tokens", BatchCutter(rows=2, weight=None), {}),
    "dividing, weighed": (Dividing, "tokens", BatchCutter(rows=2, weight=UNSHIFTED), {}),
    "loss function divides": (gpt2, "tokens", BatchCutter(rows=2), {"compute_loss_func": divides}),
    "loss function ignores": (
        gpt2,
        "tokens",
        BatchCutter(rows=2, weight=SHIFTED),
        {"compute_loss_func": ignores},
    ),
}


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
        tmp_path,
        Configured(),
        rows(21),
        BatchCutter(rows=2),
        rows(9),
        label_smoothing_factor=0.1,
        gradient_accumulation_steps=3,
    )
    assert_same(whole, cut, within=1e-7)  # the Trainer's smoother adds up in float32


class OwnLoss:
    """A loss of the user's own, which pops what it needs and calls nobody else's."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = token_mean(outputs["logits"], labels, False)
        return (loss, outputs) if return_outputs else loss


def test_a_subclass_with_a_loss_of_its_own(tmp_path: Any) -> None:
    whole, cut = pair(
        tmp_path,
        Swallowing(),
        rows(15),
        BatchCutter(rows=2, weight=UNSHIFTED),
        rows(9),
        base=type("Own", (OwnLoss, Trainer), {}),
        mixed=type("OwnCut", (OwnLoss, CutTrainer), {}),
    )
    assert_same(whole, cut)


def test_gradient_checkpointing_and_adamw(tmp_path: Any) -> None:
    whole, cut = pair(
        tmp_path,
        llama(),
        rows(15),
        BatchCutter(rows=4),
        rows(9),
        activation_checkpointing=True,
        optim="adamw_torch",
        learning_rate=1e-3,
    )
    assert_same(whole, cut)


def test_rows_without_a_label(tmp_path: Any) -> None:
    """Sub-batches of one row whose labels are all ignored, first, last and in the middle: their mean is 0/0."""
    data, held_out = rows(6, empty=(0, 3, 4, 5)), rows(6, empty=(0, 5))
    whole, cut = pair(tmp_path, Swallowing(), data, BatchCutter(rows=1, weight=UNSHIFTED), held_out)
    assert_same(whole, cut)


def test_no_labels_at_all(tmp_path: Any) -> None:
    data = rows(6, empty=tuple(range(6)))
    weighed = BatchCutter(rows=2, weight=UNSHIFTED)
    for model, cutter in ((Dividing(), BatchCutter(rows=2)), (Plain(), weighed), (Swallowing(), weighed)):
        before = copy.deepcopy(model.state_dict())
        trainer = CutTrainer(model, settings(tmp_path), train_dataset=data, cutter=cutter)
        with pytest.raises(CutError, match=r"nothing to step on|can't be seen"):
            trainer.train()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


def test_evaluating_without_a_label(tmp_path: Any) -> None:
    data = rows(9)
    trainers = [
        Trainer(Plain(), settings(tmp_path)),
        CutTrainer(Plain(), settings(tmp_path), cutter=BatchCutter(rows=4, weight=UNSHIFTED)),
    ]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    unlabelled = [{k: v for k, v in row.items() if k != "labels"} for row in data]
    whole, cut = (trainer.predict(unlabelled) for trainer in trainers)
    assert abs(whole.predictions - cut.predictions).max() <= 1e-12
    assert cut.label_ids is None
    ignored = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in data]
    losses = [trainer.evaluate(ignored)["eval_loss"] for trainer in trainers]
    assert losses == pytest.approx([float("nan")] * 2, nan_ok=True)


def test_evaluation_before_any_training_and_of_the_loss_only(tmp_path: Any) -> None:
    data, model = rows(9), gpt2()
    losses = [
        trainer.evaluate(data)["eval_loss"]
        for trainer in (
            Trainer(model, settings(tmp_path, prediction_loss_only=True)),
            CutTrainer(model, settings(tmp_path, prediction_loss_only=True), cutter=BatchCutter(rows=4)),
        )
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_resumed_in_the_middle_of_an_epoch(tmp_path: Any) -> None:
    """Bit for bit, dropout included: what is asked of the loss draws nothing from the run's random numbers."""
    model = LlamaForCausalLM(LlamaConfig(**{**llama().config.to_dict(), "attention_dropout": 0.3})).double()
    data = rows(15)

    def run(path: Any, resume: bool = False) -> Any:
        args = settings(path, save_strategy="steps", save_steps=2)
        trainer = CutTrainer(copy.deepcopy(model), args, train_dataset=data, cutter=BatchCutter(rows=2))
        trainer.train(resume_from_checkpoint=str(path / "checkpoint-2") if resume else None)
        return trainer

    undisturbed, resumed = run(tmp_path), run(tmp_path, resume=True)
    assert resumed.state.global_step == 3
    assert resumed.state.epoch == undisturbed.state.epoch == 1
    for a, b in zip(undisturbed.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_is_asked_of_the_loss_leaves_no_trace(tmp_path: Any) -> None:
    """Neither in the random numbers, of a model that draws in eval mode too, nor in running statistics."""
    model, data = Drawing(), rows(6)
    states: dict[Any, Any] = {}
    for kind, more in ((Trainer, {}), (CutTrainer, {"cutter": BatchCutter(rows=2), "coupled": "allow"})):
        mine: Any = copy.deepcopy(model)

        def hook(module: Any, args: Any, kind: Any = kind) -> None:
            if module.training:
                states.setdefault(kind, (torch.get_rng_state(), module.running.running_mean.clone()))

        mine.register_forward_pre_hook(hook)
        kind(mine, settings(tmp_path), train_dataset=data, **more).train()
    for a, b in zip(states[Trainer], states[CutTrainer], strict=True):
        assert torch.equal(a, b)


class Drawing(Dividing):
    def __init__(self) -> None:
        super().__init__()
        self.running: Any = nn.BatchNorm1d(WIDTH).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        self.running(torch.rand(3, WIDTH, dtype=torch.double))
        return super().forward(input_ids, attention_mask, labels, **kwargs)


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
@pytest.mark.parametrize("kind", ["gpt2", "tagger", "refusing"])
def test_bfloat16_is_no_further_from_the_truth(kind: str, precision: str, tmp_path: Any) -> None:
    make, labels, cutter, _ = KINDS[kind]
    cutter = BatchCutter(rows=4, weight=cutter.weight)
    model = make().bfloat16().double()  # the same values in either precision
    data, size = rows(32, labels), {"per_device_train_batch_size": 32, "max_steps": 1, "max_grad_norm": 0}
    short = {"bf16": True} if precision == "autocast" else {}
    low = copy.deepcopy(model).float() if short else copy.deepcopy(model).bfloat16()
    truth = trained_gradient(Trainer(model, settings(tmp_path, **size), train_dataset=data))
    args = settings(tmp_path, **size, **short)
    whole = trained_gradient(Trainer(copy.deepcopy(low), args, train_dataset=data))
    cut = trained_gradient(CutTrainer(low, args, train_dataset=data, cutter=cutter))
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
        tmp_path,
        gradient_accumulation_steps=3,
        max_steps=2,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}} if each else None,
    )
    trainer = CutTrainer(model, args, train_dataset=rows(21), cutter=BatchCutter(parts=3))
    trainer.accelerator.no_sync = no_sync
    trainer.train()
    assert seen == ([True] * 12 if each else [*[False] * 8, True, False, False, True])


def test_ranks_of_a_sharded_model_run_alike(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sub-batch takes part in the forwards, one without labels too; other numbers of them are an error on all."""
    data, calls = rows(6, empty=(0, 3, 4, 5)), []
    cutter = BatchCutter(rows=1, weight=UNSHIFTED)
    whole = Run(Trainer(model := Swallowing(), settings(tmp_path), train_dataset=data))
    model.load_state_dict(whole.start)
    monkeypatch.setattr("batchsplit.trainers.hf.shards", lambda trainer: True)
    model.register_forward_pre_hook(lambda module, args: calls.append(1) if module.training else None)
    cut = Run(CutTrainer(model, settings(tmp_path), train_dataset=data, cutter=cutter))
    assert_same(whole, cut)
    assert len(calls) == 3 * 6
    monkeypatch.setattr("batchsplit.trainers.hf_limits.shards", lambda trainer: True)
    cut.trainer.accelerator.gather = lambda mine: torch.cat([mine, mine + 1])
    with pytest.raises(CutError, match=r"into \[6, 7\] sub-batches: forwards are the ranks' together"):
        cut.trainer.train()


# Planted wrong cases: the tests above would notice


class Naive(Trainer):
    """The loop that everybody writes first."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        subs = BatchCutter(parts=3).cut(inputs)
        return torch.stack(
            [super(Naive, self).training_step(model, sub.data, num_items_in_batch) for sub in subs]
        ).sum()


class Wrong(CutTrainer):
    """Shares on top of the count."""

    def _ask(self, model: Any, inputs: Any, count: Any) -> bool:
        return False


def test_b28_the_naive_loop_depends_on_the_model(tmp_path: Any) -> None:
    """Exact where the model divides by the count; the sum of three means where it does not, with no error."""
    for make in (Dividing, Swallowing):
        model, data = make(), rows(6)
        whole = Run(Trainer(model, settings(tmp_path, max_grad_norm=0), train_dataset=data))
        model.load_state_dict(whole.start)
        naive = Run(Naive(model, settings(tmp_path, max_grad_norm=0), train_dataset=data))
        if make is Dividing:
            assert_same(whole, naive)
        else:
            assert naive.logs[0]["loss"] == pytest.approx(3 * whole.logs[0]["loss"], rel=0.2)
            assert apart(naive, whole) > 0.1


def test_b29_shares_on_top_of_the_count_are_noticed(tmp_path: Any) -> None:
    whole, cut = pair(
        tmp_path,
        Dividing(),
        rows(15),
        BatchCutter(parts=4, weight=UNSHIFTED),
        mixed=Wrong,
        max_grad_norm=0,
    )
    assert cut.logs[0]["loss"] < whole.logs[0]["loss"] / 2
    assert apart(cut, whole) > 0.1


# What is not exact is named, what can't be is refused


def cutting(path: Any, model: Any, cutter: Any, data: Any = None, coupled: str = "raise", **more: Any) -> Any:
    return CutTrainer(
        model,
        settings(path),
        train_dataset=data or rows(6, lengths=range(2, 8)),
        cutter=cutter,
        coupled=coupled,
        **more,
    )


class Partly(Swallowing):
    """A router's balance on top of a sum over the count."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        out = super(Swallowing, self).forward(input_ids, attention_mask, labels)
        if labels is not None:
            main = token_mean(out["logits"], labels, False, kwargs.get("num_items_in_batch"))
            out["loss"] = main + 0.02 * out["logits"].softmax(-1).mean((0, 1)).square().sum() * VOCAB
        return out


def contrasts(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    pooled = F.normalize(outputs["logits"].mean(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


def over_rows(data: Any) -> int:
    return len(data["labels"])


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "in doubt": (
        Swallowing,
        "default",
        None,
        r"\(6, 8\), and the loss is that of Swallowing, .*can't be known.*weight=",
    ),
    "in doubt, function": (gpt2, "default", ignores, r"the loss is compute_loss_func \(ignores\), .*weight="),
    "another weight": (Swallowing, over_rows, None, r"the loss of 2 rows is .* put together by weight=over_rows"),
    "no sum": (Swallowing, None, None, r"put together by weight=None, .*cut training is not exact"),
    "conflict": (
        Dividing,
        SHIFTED,
        None,
        r"is \d+ in this batch, but the loss divides by num_items_in_batch, of which",
    ),
    "partly": (Partly, "default", None, "a part of it is divided by the count and a part is not"),
    "contrastive": (Plain, over_rows, contrasts, "it compares rows with one another"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused(case: str, tmp_path: Any) -> None:
    model, weight, loss, message = REFUSED[case]
    cutter = BatchCutter(rows=2) if weight == "default" else BatchCutter(rows=2, weight=weight)
    trainer = cutting(tmp_path, model(), cutter, compute_loss_func=loss)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(CutError, match=message):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_what_is_not_exact_is_warned_of_once(tmp_path: Any) -> None:
    with pytest.warns(UserWarning, match="cut training is not exact") as caught:
        cutting(tmp_path, Swallowing(), BatchCutter(rows=2, weight=over_rows), coupled="warn").train()
    assert sum("cut training" in str(warning.message) for warning in caught) == 1
    cutting(
        tmp_path, Swallowing(), BatchCutter(rows=2, weight=over_rows), coupled="allow"
    ).train()  # warnings are errors


class Normed(Swallowing):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(6), nn.Unflatten(0, (-1, WIDTH)))
        self.double()


def test_batch_norm_in_training(tmp_path: Any) -> None:
    cutter = BatchCutter(rows=4, weight=UNSHIFTED)
    with pytest.raises(CutError, match=r"norm\.1 \(BatchNorm1d\) normalises over the rows of a sub-batch"):
        cutting(tmp_path, Normed(), cutter).train()
    with pytest.warns(UserWarning, match="normalises over the rows") as caught:
        cutting(tmp_path, Normed(), cutter, coupled="warn").train()
    assert len(caught) == 1
    cutting(tmp_path, Normed(), cutter, coupled="allow").train()
    held_out = rows(9)
    trainers = [Trainer(Normed().eval(), settings(tmp_path)), cutting(tmp_path, Normed(), cutter)]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    losses = [trainer.evaluate(held_out)["eval_loss"] for trainer in trainers]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # exact in eval mode, so nothing is raised


class Fragile(Dividing):
    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.training and (input_ids == 1).any():
            raise RuntimeError("no such token")
        return super().forward(input_ids, *args, **kwargs)


def test_an_error_names_its_sub_batch(tmp_path: Any) -> None:
    data = rows(6)
    trainer = cutting(tmp_path, Fragile(), BatchCutter(rows=1), data)
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    batch["input_ids"][4, 0] = 1
    with pytest.raises(RuntimeError, match="no such token") as caught:
        trainer.training_step(trainer.model, batch, torch.tensor(20))
    assert caught.value.__notes__ == ["This came up in SubBatch(5 of 6, 1 row, 4:5); nothing was stepped."]
    assert all(p.grad is None for p in trainer.model.parameters())
    assert "compute_loss" not in vars(trainer)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


def test_a_model_made_anew(tmp_path: Any) -> None:
    """`model_init`: what was seen of the first model's loss is not taken for the second's."""
    models = iter([Dividing(), Dividing(), Swallowing()])
    whole, data = Run(Trainer(twin := Swallowing(), settings(tmp_path), train_dataset=rows(6))), None
    data = whole.trainer.train_dataset
    twin.load_state_dict(whole.start)
    models = iter([Dividing(), Dividing(), twin])
    trainer = CutTrainer(
        None,
        settings(tmp_path),
        train_dataset=data,
        model_init=lambda: next(models),
        cutter=BatchCutter(rows=4, weight=UNSHIFTED),
    )
    trainer.train()
    cut = Run(trainer)
    assert cut.trainer.model is twin
    cut.start = whole.start
    assert_same(whole, cut)


def test_settings_that_are_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for cutter, message in (
        (4, r"cutter=4: write cutter=BatchCutter\(rows=4\)"),
        (BatchCutter(rows="auto"), "does not look for what fits in memory"),
        (BatchCutter(rows=4, weight={"ce": None}), "one loss, without named terms"),
        (BatchCutter(rows=4, weight="once"), "one loss, without named terms"),
    ):
        with pytest.raises(CutError, match=message):
            cutting(tmp_path, Dividing(), cutter)
    with pytest.raises(CutError, match="coupled='often': write"):
        cutting(tmp_path, Dividing(), BatchCutter(rows=4), coupled="often")
    args = settings(tmp_path)
    args._n_gpu = 2
    with pytest.raises(CutError, match="2 GPUs in one process: DataParallel"):
        CutTrainer(Dividing(), args, cutter=BatchCutter(rows=4))
    with pytest.raises(CutError, match="auto_find_batch_size=True makes the mathematical batch smaller"):
        CutTrainer(Dividing(), settings(tmp_path, auto_find_batch_size=True), cutter=BatchCutter(rows=4))
    for optimizer in ("lomo", "galore_adamw_layerwise"):
        with pytest.raises(CutError, match=f'optim="{optimizer}" steps inside the backward'):
            CutTrainer(Dividing(), settings(tmp_path, optim=optimizer), cutter=BatchCutter(rows=4))
    trainer = cutting(tmp_path, Dividing(), BatchCutter(rows=4))
    with monkeypatch.context() as patch:
        patch.setattr(hf_limits, "is_sagemaker_mp_enabled", lambda: True)
        with pytest.raises(CutError, match="SageMaker"):
            hf_limits.check_trainer(trainer)
    fake: Any = SimpleNamespace(
        args=trainer.args, accelerator=SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    )
    with pytest.raises(CutError, match="DeepSpeed steps inside the backward"):
        hf_limits.check_trainer(fake)
    parallel = SimpleNamespace(cp_enabled=True, sp_enabled=False)
    fake.accelerator = SimpleNamespace(distributed_type=DistributedType.NO, parallelism_config=parallel)
    with pytest.raises(CutError, match="context and sequence parallelism"):
        hf_limits.check_trainer(fake)


# TRL


def test_trl_sft(tmp_path: Any) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0", eos_token="w2")
    data = [row["input_ids"][row["attention_mask"] == 1].tolist() for row in rows(15)]
    data, held_out = (datasets.Dataset.from_dict({"input_ids": some}) for some in (data, data[:9]))
    model, runs = llama(), []
    cut_trainer = type("CutSFT", (CutTrainerMixin, trl.SFTTrainer), {})
    kinds: Any = ((trl.SFTTrainer, {}), (cut_trainer, {"cutter": BatchCutter(rows=2)}))
    for kind, more in kinds:
        args = trl.SFTConfig(
            str(tmp_path),
            per_device_train_batch_size=6,
            per_device_eval_batch_size=6,
            max_steps=3,
            learning_rate=0.5,
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            lr_scheduler_type="constant",
            bf16=False,
            activation_checkpointing=False,
            max_length=None,
        )
        trainer = kind(copy.deepcopy(model), args, train_dataset=data, processing_class=tokenizer, **more)
        run = Run(trainer)
        run.evaluated = trainer.evaluate(held_out)["eval_loss"]
        runs.append(run)
    assert_same(*runs, within=1e-6)  # TRL's own head adds up in float32
    assert runs[1].evaluated == pytest.approx(runs[0].evaluated, rel=1e-6)


# Two processes


def alike_on_a_rank(rank: int, path: str, port: int) -> None:
    """Runs in a process of its own: uncut and cut under DistributedDataParallel, in several ways."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, held_out, tags = rows(30), rows(9), rows(30, "tags")
    weighed = BatchCutter(parts=4, weight=UNSHIFTED)
    ways: Any = (
        (llama(), data, BatchCutter(rows=4), {"gradient_accumulation_steps": 2}),
        (llama(), data, BatchCutter(area=20), {"average_tokens_across_devices": False}),
        (tagger(), tags, BatchCutter(rows=4), {"gradient_accumulation_steps": 2}),
        (Plain(), data, weighed, {"ddp_find_unused_parameters": False}),
    )
    for model, some, cutter, more in ways:
        test = held_out if "gradient_accumulation_steps" in more and some is data else None
        whole, cut = pair(path, model, some, cutter, test, per_device_train_batch_size=5, **more)
        assert_same(whole, cut)
        assert isinstance(cut.trainer.model_wrapped, nn.parallel.DistributedDataParallel)


def test_two_ranks(tmp_path: Any) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # Forked, not spawned: two processes that import the frameworks anew take longer than all that they train.
    start_processes(alike_on_a_rank, (str(tmp_path), port), nprocs=2, start_method="fork")
