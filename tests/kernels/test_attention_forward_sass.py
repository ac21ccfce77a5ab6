"""Machine code of the Hopper forward kernel, compiled without a GPU: what neither its source nor PTX can promise."""

from __future__ import annotations

import re

from .compiling import compile_in_a_process


def instructions(sass: str) -> list[str]:
    return re.findall(r"/\*[0-9a-f]{4,5}\*/ +(?:@!?U?P\d+ )?(.*?) *;", sass)


def written_too_soon(lines: list[str]) -> tuple[int, list[str]]:
    """Number of products with P, and what writes registers of a P before the wait for the product that reads it."""
    parts = [i for i, line in enumerate(lines) if re.match(r"HGMMA\S+ R\d+, R\d+, ", line)]
    ends = [i for i in parts if "gsb0" in lines[i]]
    found, begin = [], -1
    for end in ends:
        read = {int(re.findall(r"R(\d+)", lines[i])[1]) + n for i in parts if begin < i <= end for n in range(4)}
        over = next(i for i in range(end, len(lines)) if lines[i].startswith("WARPGROUP.DEPBAR.LE gsb0, 0x0"))
        for line in lines[end + 1 : over]:
            written = re.match(r"(?!ST|BAR|BRA|SYNCS|WARPGROUP|RED)(\S+) R(\d+)", line)
            wide = 2 if written and (".64" in written[1] or ".WIDE" in written[1]) else 1
            if written and read & set(range(int(written[2]), int(written[2]) + wide)):
                found.append(line)
        begin = end
    return len(ends), found


def test_what_a_product_reads_is_left_alone_until_it_is_over():
    """The compiler of the GPU's code may give the registers of P to something else as soon as the product that reads
    them is under way. And maxima are taken three at a time, which it finds out by itself."""
    program = """
        import json, subprocess, tempfile
        import torch
        from fuselm.kernels._triton import triton
        from fuselm.kernels.aot import compile_only
        from fuselm.kernels.attention.api import attention, prefer_hopper
        kernels = []
        for keys, head_dim in ((300, 64), (3000, 64), (300, 128)):
            qkv = torch.empty((2, keys, 8, head_dim), dtype=torch.bfloat16)
            with prefer_hopper(), compile_only(90):
                run = triton.runtime.jit.JITFunction.run
                triton.runtime.jit.JITFunction.run = lambda *a, **k: (kernels.append(run(*a, **k)), kernels[-1])[1]
                attention(*qkv.split([4, 2, 2], -2))
                triton.runtime.jit.JITFunction.run = run
        report = []
        for kernel in kernels:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(kernel.asm["cubin"])
                file.flush()
                tool = triton.knobs.nvidia.cuobjdump.path
                report.append(subprocess.run([tool, "-sass", file.name], capture_output=True, text=True).stdout)
        print(json.dumps(report))
    """
    for consumers, sass in zip((2, 3, 2), compile_in_a_process(program), strict=True):
        lines = instructions(sass)
        # Two kinds of blocks, and the last product of a tile.
        assert written_too_soon(lines) == (3 * consumers, [])
        assert sum(line.startswith("VIMNMX3") for line in lines) >= consumers * 2 * 14


def test_what_is_written_too_soon_is_found():
    first = "/*4d10*/                   HGMMA.64x64x16.F32.BF16 R88, R148, gdesc[UR8].tnspB, R88 ;"
    last = "/*4d20*/ HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8].tnspB, R88, gsb0 ;"
    wait = "/*4d40*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    bad = ("F2FP.BF16.F32.PACK_AB R151, R6, R7", "@P0 MUFU.EX2 R120, R3", "IMAD.WIDE R122, R1, R2, R3")
    good = (
        "FADD R152, R151, R148",
        "STS [R148], R120",
        "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
    )
    for line in (*bad, *good):
        sass = "\n".join((first, last, f"/*4d30*/ {line} ;", wait))
        count, found = written_too_soon(instructions(sass))
        assert count == 1 and len(found) == (line in bad), line
