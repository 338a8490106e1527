"""The monitor inside real training loops of others: what it measures is where they log."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import regard as r
from regard.callbacks import scalars
from regard.nn import monitor
from tests.audits.families import LLAMA

WORDS = LLAMA["vocab_size"]


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def test_a_measurement_as_numbers():
    model = encoder()
    with monitor(model, every=1) as watch:
        model(torch.randn(3, 5, 8)).sum().backward()
        watch.step(loss=1.0)
    entry = watch.history[-1]
    found, every = scalars(entry), scalars(entry, heads=True)
    own = entry["layers"]["layers.0.self_attn"]
    assert found["attention/layers.0.self_attn/max_logit"] == max(own["max_logit"])
    assert found["attention/layers.0.self_attn/entropy"] == min(own["entropy"])
    assert every["attention/layers.0.self_attn/entropy/head 1"] == own["entropy"][1]
    assert found["attention/warnings"] == 0
    assert len(found) == 2 * 4 + 1
    assert json.dumps(found)


def test_numbers_that_are_none_are_left_out():
    entry = {"layers": {"": {"qk_norm": [None, 2.0]}}, "warnings": [1]}
    assert scalars(entry) == {"attention/qk_norm": 2.0, "attention/warnings": 1.0}
    assert math.isnan(scalars(entry, heads=True)["attention/qk_norm/head 0"])


# transformers


@pytest.fixture
def trainer(tmp_path, request):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    reports = getattr(request, "param", "none")
    if reports != "none":
        pytest.importorskip(reports)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    ids = torch.randint(3, WORDS, (8, 9))
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        logging_steps=2,
        per_device_train_batch_size=2,
        report_to=reports,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=data)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_real_trainer_logs_what_is_measured(trainer):
    made = r.callbacks.watch_trainer(trainer, every=2)
    trainer.train()
    mine = [entry for entry in trainer.state.log_history if "attention/warnings" in entry]
    losses = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in mine] == [1, 2, 4]
    assert losses == [2, 4]  # the trainer's own log is not lost where both are due
    assert len(made.watch.history) == 3
    place = next(iter(made.watch.history[-1]["layers"]))
    assert mine[-1][f"attention/{place}/entropy"] == min(made.watch.history[-1]["layers"][place]["entropy"])
    assert hooks(trainer.model) == 0
    trainer.train()  # a second training is watched anew
    assert len(made.watch.history) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("trainer", ["tensorboard"], indirect=True)
def test_what_is_measured_reaches_tensorboard(trainer, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    made = r.callbacks.watch_trainer(trainer, every=2)
    trainer.train()
    files = sorted(tmp_path.rglob("events.out*"))
    tags = set()
    for file in files:
        board = EventAccumulator(str(file))
        board.Reload()
        tags |= set(board.Tags()["scalars"])
    assert len(made.watch.history) == 3
    assert any("attention/" in tag and tag.endswith("max_logit") for tag in tags)


# Lightning


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_what_is_measured(tmp_path):
    try:
        import lightning.pytorch as pl
    except ImportError:
        pl = pytest.importorskip("pytorch_lightning")

    class Logger(pl.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.seen = []

        def log_metrics(self, metrics, step=None):
            self.seen.append((step, dict(metrics)))

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder = encoder()

        def training_step(self, batch, index):
            return self.encoder(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logger, model, callback = Logger(), Model(), r.callbacks.LightningMonitor(every=2)
    trainer = pl.Trainer(
        max_steps=4,
        accumulate_grad_batches=2,
        logger=logger,
        callbacks=[callback],
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(16, 5, 8)), batch_size=2))
    mine = [(step, numbers) for step, numbers in logger.seen if "attention/warnings" in numbers]
    assert [step for step, _ in mine] == [1, 2, 4]
    assert "attention/encoder.layers.0.self_attn/max_logit" in mine[0][1]
    assert callback.watch.history[-1]["loss"] is not None
    assert hooks(model) == 0


def test_what_is_not_installed_is_named(monkeypatch):
    from regard.callbacks import lightning_monitor, trainer_monitor

    monkeypatch.setattr(lightning_monitor, "Base", object)
    monkeypatch.setattr(trainer_monitor, "Base", object)
    with pytest.raises(r.errors.MissingExtraError, match=r"regard\[lightning\]"):
        lightning_monitor.LightningMonitor()
    with pytest.raises(r.errors.MissingExtraError, match=r"regard\[trainer\]"):
        trainer_monitor.TrainerMonitor(None)
