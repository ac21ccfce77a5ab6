"""`python -m fuselm.env`: versions, card, and which kernel each op would pick here, and why. Paste it into bug
reports."""

from __future__ import annotations

import importlib.metadata
import platform

import torch
from rich.console import Console
from rich.table import Table

import fuselm
from fuselm.kernels._triton import HAVE_TRITON, INTERPRET, explain_backend
from fuselm.kernels.attention.api import explain_kernel
from fuselm.model.flops import device_peak_flops

OPS = (
    "rms_norm",
    "add_rms_norm",
    "rope",
    "rope_qkv",
    "qk_norm_rope",
    "swiglu",
    "cross_entropy",
    "linear_cross_entropy",
    "decode_attention",
    "AdamW",
)
PACKAGES = ("torch", "triton", "numpy", "einops", "tokenizers", "tyro", "flash-attn", "liger-kernel", "transformers")


def package_version(name: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of fuselm, Python and the packages that matter to it."""
    packages = {name: package_version(name) for name in PACKAGES}
    return {"fuselm": fuselm.__version__, "python": platform.python_version(), **packages}


def devices() -> list[tuple[torch.device, str]]:
    """Every device that training could use here, with a description."""
    if not torch.cuda.is_available():
        return [(torch.device("cpu"), f"CPU, {torch.get_num_threads()} threads, no CUDA device")]
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        peak = device_peak_flops(device)
        rate = "unknown" if peak is None else f"{peak / 1e12:.0f} TFLOP/s"
        found.append(
            (
                device,
                f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs, "
                f"{properties.total_memory / 2**30:.1f} GiB, bf16 peak {rate} (datasheet)",
            )
        )
    return found


def kernel_choices(device: torch.device) -> list[tuple[str, str, str]]:
    """(op, kernel, reason) for each op on `device`, at a model's usual shapes."""
    choice, reason = explain_backend(device)
    rows = [(op, choice, reason) for op in OPS]
    attention = explain_kernel(device)
    return [*rows, ("attention", attention.name, attention.reason)]


def main() -> None:
    """Prints the report."""
    console = Console()
    console.print("versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    console.print(f"platform: {platform.platform()}")
    console.print(f"triton: {'installed' if HAVE_TRITON else 'missing'}{', interpreter on' if INTERPRET else ''}")
    for device, description in devices():
        table = Table(title=f"{device}: {description}", title_justify="left")
        for column in ("op", "kernel", "why"):
            table.add_column(column)
        for row in kernel_choices(device):
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
