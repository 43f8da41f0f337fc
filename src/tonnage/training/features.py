"""What the vision tower makes of the images of rows: computed once, before training, with the tower frozen.

The workers load the tower and its projector, each the whole of it, before the model that is trained, and give them up
again: training has the language model alone, and reads features where tokens of images are. Documents with the same
images share theirs, and each worker takes some of these, a chunk at a time (``chunks``). Positions of three dimensions,
of families that have such, are computed for each document by the model's own function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tonnage.data import PackedDataset
from tonnage.data.images.processing import ImageRecipe
from tonnage.data.packs.features import INDEX, TOKEN, Features, ImageFeatures, RowImages, chunk_name, positions_name
from tonnage.data.packs.pictures import Pictures
from tonnage.data.tokens.documents import Documents
from tonnage.errors import refusals, user_error
from tonnage.files.writing import write_whole
from tonnage.host.cachedir import room_for
from tonnage.model.files import ModelFiles, read_model, read_model_config, read_whole_config
from tonnage.model.vision import Tower, added_features, load_tower
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import Prompt
from tonnage.training.chunks import array_bytes, holds, make_whole, parts_of, provide, visited_packs
from tonnage.training.guest import free_memory
from tonnage.training.job import Job
from tonnage.training.setting import StoppedEarly, WorkerSetting
from tonnage.training.sight import image_recipe

CHUNK_BYTES = 64 << 20
"""Of features in fp32 that are written at a time, about."""
WHAT = "features of images"


@dataclass(frozen=True)
class SameImages:
    """Documents with the same images."""

    documents: tuple[int, ...]
    rows: int
    """Tokens of these images in each."""


def same_images(
    source: Documents, datasets: Sequence[PackedDataset], visited: Sequence[np.ndarray]
) -> list[SameImages]:
    """The documents with images in packs that a run sees, by their images, in the order of the documents.

    ``visited``: of each data set those packs.
    """
    of_packs = [data.documents(int(pack)) for data, packs in zip(datasets, visited, strict=True) for pack in packs]
    documents = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *of_packs]))
    image_tokens = source.column("image_tokens")
    by_images: dict[tuple[str, ...], list[int]] = {}
    for document in documents[image_tokens[documents] > 0].tolist():
        digests = tuple(table.digest(number) for table, number in source.images(document))
        by_images.setdefault(digests, []).append(document)
    return [SameImages(tuple(some), int(image_tokens[some[0]])) for some in by_images.values()]


def look_at_images(setting: WorkerSetting, train: PackedDataset, validation: PackedDataset | None) -> None:
    """See to it that the run's own directory has the features of its images: from before, from the cache, or new.

    Raises:
        UserError: the tower's files or an image are gone or others, features do not fit the tokens, or there is no
            room.
        StoppedEarly: a rank was asked to stop meanwhile.
    """
    plan = setting.plan
    assert plan.data.features_path is not None
    entry = Path(plan.data.features_path)

    def compute() -> None:
        datasets = [train] if validation is None else [train, validation]
        visited = visited_packs(train, validation, plan.num_packs, setting.config.seed)
        _compute(setting, train.source, same_images(train.source, datasets, visited), entry)

    provide(setting, "features", WHAT, entry, own_directory(setting), compute)


def with_features(job: Job, setting: WorkerSetting) -> Job:
    """The job with the features of images beside its rows. Raises ``UserError`` where the files are damaged."""
    features = replace(_opened(own_directory(setting)), look_ahead=setting.plan.data.look_ahead)
    return job.with_rows(lambda rows: replace(rows, features=features))


def with_pictures(job: Job, setting: WorkerSetting) -> Job:
    """The job with the images beside its rows, for the model's own tower. Raises ``UserError`` where the model's files
    are gone."""
    recipe, look_ahead = _recipe_of(setting)[1], setting.plan.data.look_ahead

    def seen(data: PackedDataset) -> PackedDataset:
        return replace(data, features=Pictures(data.source, recipe, look_ahead)) if data.images else data

    return job.with_rows(seen)


def features_of(prompts: Sequence[Prompt], run: RunDirectory, plan: Plan) -> dict[int, ImageFeatures]:
    """Features of the images of prompts, by their numbers. Raises ``UserError`` where the files are damaged."""
    looked = {number: prompt for number, prompt in enumerate(prompts) if prompt.document is not None}
    if not looked:
        return {}
    assert plan.data.validation_path is not None
    assert plan.data.features_path is not None
    features = _opened(run.features / Path(plan.data.features_path).name)
    source = PackedDataset.open(Path(plan.data.validation_path)).source
    documents = [prompt.document for prompt in looked.values() if prompt.document is not None]
    of_documents = features.of_pack(documents, [source.tokens(document) for document in documents])
    return {
        number: own.of_tokens(len(prompt.ids))
        for (number, prompt), own in zip(looked.items(), of_documents, strict=True)
        if own is not None
    }


def _opened(directory: Path) -> Features:
    try:
        return Features.open(directory)
    except (OSError, ValueError, IndexError) as error:
        change = "remove that directory: the features are computed again, or the cache has them"
        raise user_error(f"a damaged file ({error})", WHAT, change, str(directory)) from error


def own_directory(setting: WorkerSetting) -> Path:
    """Where the run has the features of its images."""
    assert setting.plan.data.features_path is not None
    return RunDirectory(setting.config.output).features / Path(setting.plan.data.features_path).name


def chunks_of(groups: Sequence[SameImages], width: int) -> Iterator[list[SameImages]]:
    """Those whose features are written together."""
    most, chunk, rows = max(1, CHUNK_BYTES // (4 * width)), list[SameImages](), 0
    for group in groups:
        if chunk and rows + group.rows > most:
            yield chunk
            chunk, rows = [], 0
        chunk.append(group)
        rows += group.rows
    if chunk:
        yield chunk


def _compute(setting: WorkerSetting, source: Documents, groups: Sequence[SameImages], entry: Path) -> None:
    """Compute all chunks that are not there yet, and make the cache's entry of them."""
    world, phases, parts = setting.world, setting.phases, parts_of(entry)
    eye: _Eye | None = None
    index: list[tuple[int, ...]] = []
    done, total = 0, sum(len(group.documents) for group in groups)
    setting.log(f"images: computing the features of those of {total:,} rows")
    (files, recipe), trusts = _recipe_of(setting), setting.config.trust_remote_code
    whole = read_whole_config(files, trust_remote_code=trusts)
    width = (1 + added_features(whole)) * setting.plan.model.hidden_size
    for number, chunk in enumerate(chunks_of(groups, width)):
        index += _index_of(source, chunk, number)
        rows, path = sum(group.rows for group in chunk), parts / chunk_name(number)
        is_whole = world.rank == 0 and holds(path, rows)
        is_there, stops = world.sum(float(is_whole), float(setting.stop_requested()))
        if stops:
            raise StoppedEarly
        if not is_there:
            if eye is None:
                setting.log("images: loading the vision tower")
                text, dtype = read_model_config(files, trust_remote_code=trusts), setting.precision.compute
                eye = _Eye(load_tower(files, text, dtype, world.device, trusts=trusts), recipe, source, setting, width)
                phases.enter("features", micro_batch=done, num_micro_batches=total)
            features, positions = eye.look(chunk)
            if world.rank == 0:
                with refusals(f"{WHAT} could not be written", path):
                    room_for(path)
                    if positions is not None:  # first, as a chunk that is there is whole
                        write_whole(parts / positions_name(number), array_bytes(positions))
                    write_whole(path, array_bytes(features))
        done += sum(len(group.documents) for group in chunk)
        phases.advance(done, total)
    del eye
    free_memory(world.device)
    if world.rank == 0:
        whole_index = np.array(index, dtype=np.int64).reshape(-1, 5)
        num_chunks = index[-1][1] + 1 if index else 0
        make_whole(entry, num_chunks, {INDEX: whole_index, TOKEN: np.array(recipe.token_id, dtype=np.int64)})
    world.barrier()


def _index_of(source: Documents, chunk: Sequence[SameImages], number: int) -> Iterator[tuple[int, ...]]:
    """The rows of the index for the documents of a chunk."""
    first = first_position = 0
    for group in chunk:
        for document in group.documents:
            yield document, number, first, group.rows, first_position
            first_position += len(source.tokens(document))
        first += group.rows


@dataclass(frozen=True)
class _Eye:
    """A tower with its weights, which looks at the images of documents."""

    tower: Tower
    recipe: ImageRecipe
    source: Documents
    setting: WorkerSetting
    width: int
    """Numbers for each token of an image."""

    def look(self, chunk: Sequence[SameImages]) -> tuple[np.ndarray, np.ndarray | None]:
        """Features of a chunk as they are stored, (rows, width), and positions of its documents, int32 (tokens, 3), if
        tokens have such: on every rank, each of which computes some of them."""
        world = self.setting.world
        rows = sum(group.rows for group in chunk)
        tokens = sum(len(self.source.tokens(document)) for group in chunk for document in group.documents)
        features, positions = torch.zeros(rows, self.width), torch.zeros(tokens, 3)
        has_positions = 0.0
        first = first_position = 0
        for number, group in enumerate(chunk):
            lengths = [len(self.source.tokens(document)) for document in group.documents]
            if number % world.size == world.rank:
                own_features, own_positions = self._of_group(group)
                features[first : first + group.rows] = own_features
                if own_positions is not None:
                    has_positions = 1.0
                    positions[first_position : first_position + sum(lengths)] = own_positions
            first, first_position = first + group.rows, first_position + sum(lengths)
            self.setting.phases.progress()  # a chunk may take longer than a step ever should
        features, (has_positions,) = world.total(features.to(world.device)).cpu(), world.sum(has_positions)
        in_space = world.total(positions.to(world.device)).cpu().numpy() if has_positions else None
        return _stored(features, self.tower.dtype), None if in_space is None else in_space.astype(np.int32)

    def _of_group(self, group: SameImages) -> tuple[Tensor, Tensor | None]:
        """Features of the images of a group, fp32 (rows, width), and positions of all tokens of its documents, one
        document after another, (tokens, 3)."""
        images = RowImages(self.source, group.documents[0], self.recipe)
        inputs = images.inputs()
        with torch.no_grad():
            features = self.tower.features(inputs).float().cpu()
        if tuple(features.shape) != (group.rows, self.width):
            raise user_error(
                where=images.where,
                found=f"features of shape {tuple(features.shape)}, and {group.rows:,} tokens of images in the row",
                needed=f"one of {self.width:,} numbers for each: model and processor do not belong together",
                change="choose another model, or report this with the model's name",
            )
        positions = []
        for document in group.documents:
            ids = torch.from_numpy(self.source.tokens(document).astype(np.int64))
            own = self.tower.positions(ids, inputs)
            if own is None:
                return features, None
            positions.append(own.T.float())
        return features, torch.cat(positions)


def _recipe_of(setting: WorkerSetting) -> tuple[ModelFiles, ImageRecipe]:
    """The model's files, and how images become tokens of it. Raises ``UserError`` where the files are gone."""
    config = setting.config
    files, _ = read_model(
        config.model, revision=config.revision, tokenizer=False, trust_remote_code=config.trust_remote_code
    )
    recipe = image_recipe(files, trusts=config.trust_remote_code, pixels=config.data.pixels)
    assert recipe is not None, "decided before"
    return files, recipe


def _stored(features: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Features in the type in which they were computed; bf16 as its bits."""
    features = features.to(dtype)
    stored: np.ndarray = (features.view(torch.uint16) if dtype == torch.bfloat16 else features).numpy()
    return stored
