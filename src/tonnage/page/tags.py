"""Tags and a note, which people give a run: in its directory, where they move with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from tonnage.errors import UserError, user_error
from tonnage.files.reading import read_record
from tonnage.files.writing import write_json
from tonnage.rundir.directory import RunDirectory

MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 20, 40, 10_000


@dataclass(frozen=True)
class Tags:
    tags: list[str] = field(default_factory=list)
    note: str = ""


def read_tags(run: RunDirectory) -> Tags:
    """Those of a run; none where nobody gave it any, or the file is no such file."""
    try:
        return read_record(run.tags, Tags) if run.tags.is_file() else Tags()
    except UserError:
        return Tags()


def write_tags(run: RunDirectory, tags: Tags) -> Tags:
    """Give a run tags and a note in place of those it has; returns them as they were written.

    Raises:
        UserError: they are too many or too long.
    """
    cleaned = list(dict.fromkeys(tag for tag in (" ".join(tag.split()) for tag in tags.tags) if tag))
    if len(cleaned) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in cleaned):
        needed = f"at most {MOST_TAGS} tags of at most {LONGEST_TAG} characters"
        raise user_error(f"{len(cleaned)} tags, the longest of {max(map(len, cleaned))} characters", needed)
    if len(tags.note) > LONGEST_NOTE:
        raise user_error(f"a note of {len(tags.note):,} characters", f"at most {LONGEST_NOTE:,}")
    written = Tags(cleaned, tags.note)
    write_json(run.tags, asdict(written))
    return written
