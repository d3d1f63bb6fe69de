"""A training run: warmup, constant learning rate, and a linear decay to zero at the end."""

import contextlib
import csv
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from demo import model as demo_model
from demo.optimizer import MATRIX_RATE, optimizers
from demo.tokens import Chunks

SEQUENCES, PARTS = 8, 3  # a step adds the gradients of 3 x 8 chunks
TOKENS_PER_STEP = SEQUENCES * PARTS * demo_model.CONTEXT
WARMUP_STEPS = 100
COLUMNS = ("step", "tokens", "loss", "balance_loss", "learning_rate", "tokens_per_s")


@dataclass
class Progress:
    """State of a checkpoint without tensors. The decay covers steps `decay_from` to `decay_from + decay_steps`."""

    step: int = 0
    decay_from: int | None = None
    decay_steps: int = 0
    log: list[tuple] = field(default_factory=list)

    def rate(self) -> float:
        """Factor of the learning rate in the next step."""
        warm = min(1.0, (self.step + 1) / WARMUP_STEPS)
        if self.decay_from is None:
            return warm
        return warm * max(0.0, 1 - (self.step - self.decay_from) / self.decay_steps)

    def finished(self) -> bool:
        return self.decay_from is not None and self.step >= self.decay_from + self.decay_steps


class Run:
    def __init__(self, stream, folder: Path, seed: int):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.folder, self.checkpoint = folder, folder / "checkpoint.pt"
        self.model = demo_model.build(seed).to(self.device)
        self.optimizers = optimizers(self.model)
        self.chunks = Chunks(stream, demo_model.CONTEXT, seed)
        self.progress, self.stopped = Progress(), False
        if self.checkpoint.exists():
            self._load()

    def train(self, tokens: int | None, minutes: float | None, finish: int | None, checkpoint_minutes: float) -> bool:
        """Trains until the budget is spent, then decays over `finish` tokens. Returns True when the decay is complete."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: setattr(self, "stopped", True))
        self._write_log()
        self.model.train()
        begin = saved = time.monotonic()
        while not self.progress.finished() and not self.stopped:
            if self.progress.decay_from is None and self._spent(tokens, minutes, begin, finish):
                if finish is None:
                    break
                self.progress.decay_from = self.progress.step
                self.progress.decay_steps = max(1, finish // TOKENS_PER_STEP)
            self._step()
            if time.monotonic() - saved >= 60 * checkpoint_minutes:
                self._save()
                saved = time.monotonic()
        self._save()
        return self.progress.finished()

    def _spent(self, tokens: int | None, minutes: float | None, begin: float, finish: int | None) -> bool:
        """Whether the constant phase is over. Without a budget it has no end, unless a decay is requested."""
        if tokens is None and minutes is None:
            return finish is not None
        over_tokens = tokens is not None and self.progress.step * TOKENS_PER_STEP >= tokens
        return over_tokens or (minutes is not None and time.monotonic() - begin >= 60 * minutes)

    def _step(self) -> None:
        begin, progress = time.monotonic(), self.progress
        autocast = torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()
        entropy = balance = 0.0
        for part in range(PARTS):
            first = (progress.step * PARTS + part) * SEQUENCES
            chunks = torch.from_numpy(self.chunks.batch(first, SEQUENCES)).to(self.device)
            with autocast:
                loss, part_entropy, part_balance = demo_model.losses(self.model, chunks)
            (loss / PARTS).backward()
            entropy, balance = entropy + part_entropy.item() / PARTS, balance + part_balance.item() / PARTS
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        rate = progress.rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["rate"]
            optimizer.step()
            optimizer.zero_grad()
        progress.step += 1
        self._report(entropy, balance, rate, time.monotonic() - begin)

    def _report(self, entropy: float, balance: float, rate: float, seconds: float) -> None:
        step = self.progress.step
        speed = TOKENS_PER_STEP / seconds
        numbers = (f"{entropy:.6f}", f"{balance:.5f}", f"{rate * MATRIX_RATE:.6f}", f"{speed:.0f}")
        row = (step, step * TOKENS_PER_STEP, *numbers)
        self.progress.log.append(row)
        with (self.folder / "loss.csv").open("a", newline="") as file:
            csv.writer(file).writerow(row)
        if step % 10 == 0:
            print(f"step {step}  {row[1] / 1e6:.2f} M tokens  loss {entropy:.4f}  balance {balance:.4f}  "
                  f"rate {rate:.3f}  {speed:.0f} tokens/s", flush=True)

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": vars(self.progress),
            "random": torch.get_rng_state(),
        }
        partial = self.checkpoint.with_suffix(".tmp")
        torch.save(state, partial)
        partial.replace(self.checkpoint)
        print(f"checkpoint at step {self.progress.step}", flush=True)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"].cpu())
        print(f"continues at step {self.progress.step}", flush=True)

    def _write_log(self) -> None:
        """Drops rows after the checkpoint, because those steps are repeated."""
        with (self.folder / "loss.csv").open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *self.progress.log])
