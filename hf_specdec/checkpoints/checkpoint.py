"""The files of a drafter checkpoint: their paths, the content of `config.json`, the tensors of the weight files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypedDict

import torch
from transformers import logging as hf_logging

from ..host.serving import cached_file, extract_commit_hash
from .limits import check_settings
from .weight_files import StoredTensor, read_header, read_stored, with_parts

CONFIG_FILE = "config.json"
# In the order in which transformers prefers them.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# An MTP module that SGLang's script exports (export_deepseek_nextn.py), beside an index of shards that are not there.
NEXTN_FILE = "nextn_layer_parameters.safetensors"

# The settings of Mistral's own format.
_MISTRAL_FILE = "params.json"

# DFlash's trained embedding of the mask token.
_MASK_FILE = "mask_embedding.pt"
# PARD-2's projection of the target's hidden states, a pickled file beside the draft model's weights.
PROJECTION_FILE = "warp_model.bin"

# Parts of quantised weights in any form, by the last parts of their names.
_PART = re.compile(
    r"(.*[._])?(scale|scales|scale_inv|scale_2|global_scale|zero_point|weight_packed|weight_shape|qweight|qzeros|g_idx"
    r"|SCB|weight_format|absmax|quant_map|nested_absmax|nested_quant_map|blocks|bitsandbytes__\w+)"
)

# Most missing tensors, unexpected tensors, or wrong shapes that an error message names.
MAX_NAMED_TENSORS = 16


class HubOptions(TypedDict, total=False):
    """Hub options of `PreTrainedModel.from_pretrained`."""

    revision: str | None
    subfolder: str
    variant: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's checkpoint. The files that the drafter needs are on this machine; the weights are not loaded.

    Attributes:
        name: repository or folder as the user gave it, with the subfolder.
        folder: the folder of the files: the given one, or the Hub cache's snapshot of a commit.
        config: content of `config.json`.
        tensors: the selected tensors of the weight files, by their names in the files, without the parts of quantised
            weights, which are called `weight`. None for a drafter with random weights.
        variant: see `open_checkpoint`.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor] | None
    variant: str | None = None

    def read(self, kept: Collection[str] = ()) -> dict[str, torch.Tensor | dict[str, torch.Tensor]]:
        """Load `tensors` and no other tensors of their files; see `read_stored`."""
        return read_stored(self.tensors, kept)

    def only(self, names: Collection[str]) -> Checkpoint:
        """The checkpoint with only the tensors called `names`."""
        return replace(self, tensors={name: self.tensors[name] for name in names})

    def check_not_quantised(self, names: Iterable[str], what: str = "weights") -> None:
        """Raise `ValueError` if one of the `names` in the files is that of a part of a quantised weight in a form that
        is not read."""
        part = next((name for name in names if _PART.fullmatch(name)), None)
        if part is None:
            return
        layer = part.rpartition(".")[0] + "."
        own = [f"{name} {one.dtype} {list(one.shape)}" for name, one in self.tensors.items() if name.startswith(layer)]
        raise ValueError(
            f"The {what} of {self.name} are quantised in a form that is not read here (they have {', '.join(own)}); "
            "expected bfloat16, float16 or float32; 8 bits with a scale for a tensor, its rows, or blocks or groups of "
            "sizes in config.json; or symmetric 4 bits of compressed-tensors, weight_packed and weight_scale, in NVFP4 "
            f"weight_global_scale, too. Use a checkpoint whose {what} are not quantised."
        )

    def check_differences(
        self,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]] = (),
        errors: Iterable[str] = (),
    ) -> None:
        """Raise `ValueError`, which names the differences, if the files' tensors are not those of config.json.

        `mismatched` has name, shape found and shape expected of tensors; `errors` are messages of other problems.
        """
        shapes = [f"{name} is {list(found)}, expected {list(expected)}" for name, found, expected in sorted(mismatched)]
        found = (
            ("missing tensors", sorted(missing)),
            ("unexpected tensors", sorted(unexpected)),
            ("wrong shapes", shapes),
            ("errors", list(errors)),
        )
        problems = []
        for what, names in found:
            more = f" and {len(names) - MAX_NAMED_TENSORS} more" if len(names) > MAX_NAMED_TENSORS else ""
            problems += [f"{what}: {', '.join(names[:MAX_NAMED_TENSORS])}{more}"] if names else []
        if problems:
            raise ValueError(f"The weights of {self.name} do not fit its config.json: {'; '.join(problems)}.")


@contextmanager
def config_errors(name: str) -> Iterator[None]:
    """Context for code that depends on values in the config.json of `name`: errors become one-line `ValueError`s.

    transformers and torch raise various exceptions for invalid values. An `OSError` stays an `OSError`.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if "\n" not in str(error):
            raise
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{name} cannot be read: {_one_line(error)}") from error
    except Exception as error:
        raise ValueError(
            f"The {CONFIG_FILE} of {name} describes no model that can be built ({type(error).__name__}: "
            f"{_one_line(error)})."
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Context without transformers' progress bar and loading report, which `Checkpoint.check_differences` replaces."""
    was_shown, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if was_shown:
            hf_logging.enable_progress_bar()


# The names of the tensors to read, given a checkpoint's name, config.json and the names of all tensors.
Selection = Callable[[str, Mapping[str, Any], Collection[str]], Collection[str]]


@dataclass(frozen=True)
class _Files:
    """The files of a folder, or of a Hub repository at one revision."""

    repo: str | Path
    subfolder: str
    revision: str | None
    hub: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.repo}/{self.subfolder}" if self.subfolder else str(self.repo)

    def fetch(self, filename: str) -> Path | None:
        """Path of the file on this machine; None if the repository has no such file."""
        options = {"subfolder": self.subfolder, "revision": self.revision, **self.hub}
        try:
            found = cached_file(self.repo, filename, _raise_exceptions_for_missing_entries=False, **options)
        except (OSError, ValueError):
            raise
        except Exception as error:  # The client's transport errors share no base class across its versions.
            raise OSError(
                f"Could not fetch {filename} of {self.repo}: {error}. Try again to resume the download."
            ) from error
        return None if found is None else Path(found)


def open_checkpoint(
    repo: str | Path,
    subfolder: str = "",
    revision: str | None = None,
    variant: str | None = None,
    select: Selection | None = None,
    has_no_weights: Callable[[str, Mapping[str, Any]], bool] = lambda name, config: False,
    **hub: Any,
) -> Checkpoint:
    """Find the files of a checkpoint, download those that are needed, and read the headers of the weight files.

    Args:
        repo, subfolder, hub: folder, or Hub repository with `HubOptions`.
        revision: branch, tag or commit. All files are taken from the one commit that it resolves to.
        variant: the part of the weight files' names that `save_pretrained(variant=)` adds.
        select: selects the needed tensors; None for all. Shards without any of them are not fetched.
        has_no_weights: called with the checkpoint's name and config.json if there is no weight file of a usual name;
            returns whether none is needed, and raises an error for families that are not supported.

    Raises:
        OSError: the folder or repository, its `config.json` or a weight file is missing or not accessible.
        ValueError: a file is invalid or outside of the checkpoint's folder, or there is a mask embedding.
    """
    config_file, config = read_config_file(repo, subfolder, revision, **hub)
    files = _Files(repo, subfolder, extract_commit_hash(str(config_file), None) or revision, hub)
    if "dflash_config" in config and files.fetch(_MASK_FILE) is not None:
        raise ValueError(
            f"{files.name} has an embedding of its mask token of its own ({_MASK_FILE}), which is not supported; "
            "expected a DFlash drafter that reads the target's."
        )

    def selected(names: Collection[str]) -> Collection[str]:
        with config_errors(files.name):
            return names if select is None else select(files.name, config, names)

    try:
        weights = _fetch_weights(files, selected, variant)
    except FileNotFoundError:
        if not has_no_weights(files.name, config):
            raise
        weights = []
    projection = files.fetch(PROJECTION_FILE) if has_projection(config) else None
    headers = map(read_header, weights if projection is None else [*weights, projection])
    tensors = {name: tensor for header in headers for name, tensor in header.items()}
    kept = set(selected(tensors.keys()))
    tensors = with_parts({key: tensors[key] for key in tensors if key in kept}, config)
    return Checkpoint(files.name, config_file.parent, config, tensors, variant)


def has_projection(config: Mapping[str, Any]) -> bool:
    """Whether `config.json` is that of PARD-2, which reads projected hidden states of the target."""
    return config.get("spd_type") == "pard2" or any(key == "pard2" or key.startswith("pard2_") for key in config)


def read_config_file(
    repo: str | Path, subfolder: str = "", revision: str | None = None, **hub: Any
) -> tuple[Path, dict[str, Any]]:
    """Path and content of `config.json`, downloaded if needed; arguments and errors are those of `open_checkpoint`.
    Raises `ValueError` also for values that `check_settings` refuses, and for Mistral's own format."""
    files = _Files(repo, subfolder, revision, hub)
    check_folder(repo)
    if not isinstance(subfolder, str) or not _is_inside(subfolder):
        raise ValueError(f"subfolder is {subfolder!r}; expected a folder inside {repo}.")
    config_file = files.fetch(CONFIG_FILE)
    if config_file is None and files.fetch(_MISTRAL_FILE) is not None:
        raise ValueError(
            f"{files.name} has no {CONFIG_FILE} but {_MISTRAL_FILE}: it is in Mistral's own format, in which it "
            "publishes EAGLE-1 drafters; they are not supported. Use an EAGLE-3 drafter for the same target."
        )
    if config_file is None:
        raise OSError(
            f"{files.name} has no {CONFIG_FILE}; expected a folder or a Hub repository that holds a drafter's "
            f"{CONFIG_FILE} and weights. If they are in a subfolder, pass `subfolder=`. Offline (HF_HUB_OFFLINE, "
            "`local_files_only=True`) only what was downloaded before is found."
        )
    config = _read_json(config_file)
    check_settings(config, files.name)
    return config_file, config


def check_folder(repo: str | Path) -> None:
    """Raise `FileNotFoundError` if `repo` must be a path, not a Hub repository, and is no folder."""
    path = Path(repo)
    is_path = isinstance(repo, Path) or path.is_absolute() or len(path.parts) > 2 or str(repo).startswith((".", "~"))
    if is_path and not path.is_dir():
        raise FileNotFoundError(f"{repo} is not a folder; expected one, or a repository on the Hub (OWNER/NAME).")


def _is_inside(path: str) -> bool:
    """Whether a relative `path` stays inside its base folder on every operating system."""
    flavours = (PurePosixPath(path), PureWindowsPath(path))
    return not any(one.is_absolute() or one.drive or one.root or ".." in one.parts for one in flavours)


def _fetch_weights(
    files: _Files, select: Callable[[Collection[str]], Collection[str]], variant: str | None
) -> list[Path]:
    """Paths of the weight files on this machine; of a sharded checkpoint only shards with selected tensors."""
    names = (*WEIGHT_FILES, NEXTN_FILE)
    if variant is not None:  # before the suffix: `model.safetensors.index.fp16.json`
        names = [f".{variant}.".join(name.rsplit(".", 1)) for name in WEIGHT_FILES]
    file = next((found for found in map(files.fetch, names) if found is not None), None)
    if file is None:
        raise FileNotFoundError(f"{files.name} has a {CONFIG_FILE} but no weight file; looked for {', '.join(names)}.")
    if file.suffix != ".json":
        return [file]
    weight_map = _read_index(file)
    # The reader reports it if no tensor is selected. An empty index is damaged.
    selected = select(weight_map.keys()) if weight_map else ()
    if weight_map and not selected:
        return []
    shards = {shard: files.fetch(shard) for shard in sorted({weight_map[tensor] for tensor in selected})}
    missing = [shard for shard, found in shards.items() if found is None]
    exported = files.fetch(NEXTN_FILE) if len(missing) == len(shards) > 0 else None
    if exported is not None:
        return [exported]
    if missing or not shards:
        raise OSError(
            f"{file.name} of {files.name} lists {len(shards)} shards, of which are missing: {missing or 'all'}."
        )
    return list(shards.values())


def _read_index(file: Path) -> dict[str, str]:
    """The shards of tensors, by the tensors' names."""
    index = _read_json(file)
    weight_map = index.get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise ValueError(f"{file} has a weight_map that is a {type(weight_map).__name__}; expected an object.")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or not _is_inside(shard):
            raise ValueError(
                f"{file} has {tensor} in the shard {shard!r}; expected the name of a file in the same folder."
            )
    if not isinstance(index.get("metadata"), dict):
        raise ValueError(f'{file} has no object "metadata", without which transformers loads no shards; {{}} will do.')
    return weight_map


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: too many nested levels
        raise ValueError(f"{file} is not a JSON file ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a JSON {type(content).__name__}; expected an object.")
    return content
