"""What is remarkable about the weight files of a run's model, as its plan holds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Carried:
    """Tensors of a model's files that are not trained, and that an export takes over as they are."""

    part: str
    """What they belong to, such as the vision tower."""
    num_tensors: int
    num_bytes: int

    def __str__(self) -> str:
        several = f"{self.num_tensors:,} tensors" if self.num_tensors > 1 else "1 tensor"
        size = next(
            f"{self.num_bytes / scale:.3g} {unit}"
            for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
            if self.num_bytes >= scale or scale == 1
        )
        return f"{self.part}: {several}, {size}, not trained, carried into the export"


@dataclass(frozen=True)
class WeightFacts:
    """What is remarkable about a model's weight files, beside the model that config.json describes."""

    missing: tuple[str, ...] = ()
    """Parameters that they lack, and that are initialised."""
    left_out: tuple[str, ...] = ()
    """Tensors that the model has no place for."""
    scores: bool = False
    """Whether the model is a reward model: its head may be missing, and that of logits is left out."""
    unwrapped: bool = False
    """Whether prefixes of wrappers are taken off the names."""
    untied: bool = False
    """Whether the head is another one than the embedding that it is said to be tied to, and is trained as such."""
    once_quantised: str | None = None
    """What config.json says that the weights are quantised with, although they are not."""
    unpacked: str | None = None
    """How the weights are packed that are read, trained and exported as others are."""
    stored: tuple[tuple[str, str], ...] = ()
    """Those of them that may keep their form while they are frozen, by their paths, and the form."""
    carried: tuple[Carried, ...] = ()
    """What is not trained, and taken over into the export."""
    carried_digest: str = ""
    """Tells whether the model's files still hold the same of that; empty where there is nothing."""
    base_digest: str = ""
    """Tells whether they still hold the same weights, where some of those are not trained; else empty."""
    base_stamp: str = ""
    """Tells whether they are the files that they were, by names, sizes and times."""

    @property
    def widened(self) -> str:
        """Which of the weights that are packed are read as plain numbers, in words."""
        if not self.stored:
            return "read as plain numbers"
        return "frozen linear layers and experts stay so, others are read as plain numbers"

    def notes(self) -> list[str]:
        """In words, a sentence for each."""
        notes = [str(one) for one in self.carried]
        if self.unpacked is not None:
            notes.append(f"stored as {self.unpacked}; {self.widened}; an export with merged weights is not packed")
        missing, left_out = ("a new head of scores", "the head of logits") if self.scores else ("", "")
        if self.missing:
            why = missing or "allow_missing"
            notes.append(f"{_counted(self.missing, 'parameter')} not in the files and initialised ({why})")
        if self.left_out:
            why = left_out or "allow_unexpected"
            notes.append(f"{_counted(self.left_out, 'tensor')} not in the model and left out ({why})")
        if self.unwrapped:
            notes.append("prefixes that a wrapper left (such as _orig_mod or module) are taken off the names")
        if self.untied:
            notes.append("the stored head is not the embedding, as tie_word_embeddings says: both are trained")
        if self.once_quantised is not None:
            notes.append(
                f"config.json says quantised ({self.once_quantised}), and they are not: the export will not say so"
            )
        return notes


def _counted(names: tuple[str, ...], what: str) -> str:
    several = f"{len(names):,} {what}s are" if len(names) > 1 else f"1 {what} is"
    rest = len(names) - 3
    return f"{several} ({', '.join(names[:3])}{f' and {rest:,} more' if rest > 0 else ''})"
