"""The key of torch.compile's caches on disk holds a hash of these kernels' sources.

A compiled graph calls ops with the arguments, and takes from them the outputs, that they had when it was compiled; the
backward formulas of ops are part of it. The caches (AOTAutograd's and Inductor's) know an op by its name, and a
backward op not even by that: an entry that another version of fuselm wrote would be taken for this one's. PyTorch has
no key for an op, but a text that enters all keys, `torch.compiler.config.cache_key_tag`. The user's own text stays in
it; as it may be set later, and since torch 2.12 is another in each thread, the hash is added again whenever an op is
compiled.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch
import torch.compiler.config as config


@functools.cache
def sources_tag() -> str:
    """The text "fuselm-" and 16 hexadecimal digits, a hash of all files in this folder: read once, in milliseconds."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
    return f"fuselm-{digest.hexdigest()[:16]}"


def key_compile_caches() -> None:
    """Adds `sources_tag()` to the key of what this thread compiles from now on. torch.compile calls it in a trace."""
    if torch.compiler.is_dynamo_compiling():  # a version that does not know the mark below traces this
        return
    tag = config.cache_key_tag
    if sources_tag() not in tag:
        config.cache_key_tag = f"{tag}+{sources_tag()}" if tag else sources_tag()


# What torch.compiler.assume_constant_result does, which would import Dynamo, a second or more.
key_compile_caches._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
