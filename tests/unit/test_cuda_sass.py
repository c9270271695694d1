"""The machine code of each kernel: it rounds where its text says and nowhere else, keeps subnormals, uses no stack.

PTX is not the last word: ptxas may contract, flush, spill, or lower an instruction that a target lacks.
"""

import re
import shutil
from collections import Counter
from functools import cache

import pytest

from cuda_kernels import KernelBuildError, _sass
from cuda_kernels._nvrtc import compile_cubin
from cuda_kernels._sass import Instruction, disassembled, instructions
from cuda_kernels.decode import DECODE
from cuda_kernels.encode import ENCODE
from cuda_kernels.footprint import KERNELS, compiled, kept
from cuda_kernels.fp4_sums import FP4_SUMS
from cuda_kernels.fp8_wgmma import FP8_WGMMA
from tests.unit.test_cuda_gate import ARITHMETIC, PAIRS

pytestmark = pytest.mark.usefixtures("nvdisasm")

DIVIDES32 = {"MUFU.RCP", "FCHK", "FFMA"}
DIVIDES64 = {"MUFU.RCP64H", "DFMA", "DMUL", "FFMA"}  # FFMA: only whether the upper word of the quotient is large
MADE_OF = {  # an instruction of PTX: what may round in its machine code
    "add.rn.f32": {"FADD"},
    "sub.rn.f32": {"FADD"},
    "mul.rn.f32": {"FMUL"},
    "fma.rn.f32": {"FFMA"},
    "div.rn.f32": DIVIDES32,
    "add.rn.f64": {"DADD"},
    "sub.rn.f64": {"DADD"},
    "mul.rn.f64": {"DMUL"},
    "fma.rn.f64": {"DFMA"},
    "div.rn.f64": DIVIDES64,
    "sqrt.rn.f64": {"MUFU.RSQ64H", "DFMA", "DMUL"},
}
ROUTINE_OF = {  # the compiler's routine: the instruction of PTX that calls it; nothing where it has no float
    r"__cuda_sm20_(div|rem)_[su](16|64)": "",
    r"__cuda_sm70_(shflsync|votesync|warpsync)\w*": "",
    r"__cuda_sm3x_div_rn_noftz_f32_slowpath": "div.rn.f32",
    r"__cuda_sm20_div_rn_f64_full": "div.rn.f64",
    r"__cuda_sm20_dsqrt_rn_f64_mediumpath_v\d": "sqrt.rn.f64",
}
ROUNDS = re.compile(r"[FDH](ADD|MUL|FMA)\w*|MUFU|FCHK|FSWZADD")
MATRIX = re.compile(r"[A-Z]*MMA\b")
FP8_MMA_SYNC = "mma.sync.aligned.m16n8k32.row.col.f32.{}.{}.f32"
WIDE = {  # file: loads and stores that its entries must have; .E alone moves 4 bytes, here four codes
    "encode.cu": {"LDG.E.128", "STG.E"},
    "cast.cu": {"LDG.E.128", "STG.E"},
    "decode.cu": {"LDG.E.128", "STG.E.128"},
    "fp4_sums.cu": {"LDG.E.128"},
    "fp4_blocks.cu": {"LDG.E.128"},
    "fp8_mma.cu": {"LDG.E.128"},
}


def is_move(one: Instruction) -> bool:
    """HFMA2 as a way to load a constant: -0 * 0 + it, on a unit that has nothing else to do."""
    return one.opcode in ("HFMA2", "HFMA2.MMA") and one.operands[1:3] == ("-RZ", "RZ")


def rounding(code: list[Instruction]) -> Counter[str]:
    """Opcodes that may round, without constants and the estimate 1 / n of an integer division by n, which is mended."""
    found: Counter[str] = Counter()
    made: dict[str, str] = {}
    for one in code:
        register = one.operands[0] if one.operands else ""
        word = one.opcode if one.opcode.startswith("MUFU") else one.opcode.split(".")[0]
        estimate = word == "MUFU.RCP" and re.fullmatch(r"I2F\.(U32\.|U64\.)?RP", made.get(one.operands[1], ""))
        if ROUNDS.match(word) and not is_move(one) and not estimate:
            found[word] += 1
        made[register] = one.opcode
    return found


def complaints(code: list[Instruction], arithmetic: set[str], lowered: dict[str, int], stack: int = 0) -> set[str]:
    """What is wrong with the code of a text of that ``arithmetic``; lowered: how often what matrix products add.

    stack: bytes that a thread may keep there.
    """
    own = [one for one in code if not one.routine]
    found = rounding(own)
    may = set().union(*(MADE_OF[word] for word in arithmetic))
    wrong = {word for word in found if word not in may and found[word] != lowered.get(word, 0)}
    wrong |= {one.opcode for one in own if ".FTZ" in one.opcode and one.opcode != "F2I.FTZ.U32.TRUNC.NTZ"}
    wrong |= {one.opcode for one in code if not stack and one.opcode.split(".")[0] in ("LDL", "STL")}
    for routine in {one.routine for one in code} - {""}:
        calls = [call for name, call in ROUTINE_OF.items() if re.fullmatch(rf"\$__internal_\d+_\${name}", routine)]
        wrong |= {routine} if not calls or (calls[0] and calls[0] not in arithmetic) else set()
        if calls == [""]:
            part = [one for one in code if one.routine == routine]
            wrong |= set(rounding(part)) | {one.opcode for one in part if ".FTZ" in one.opcode}
    return wrong


def product(word: str, arch: str) -> dict[str, int]:
    """Words of machine code that one multiplication of matrices in PTX makes.

    mma.sync of FP8 is native on sm_89 alone; later devices take two float16 products of the unpacked codes and add.
    """
    if match := re.fullmatch(r"mma\.sync\.aligned\.m16n8k(16|32)\.row\.col\.s32\.s8\.s8\.s32", word):
        return {f"IMMA.168{match[1]}.S8.S8": 1}
    if match := re.fullmatch(FP8_MMA_SYNC.replace(".", r"\.").format(*[r"(e4m3|e5m2)"] * 2), word):
        native = {f"QMMA.16832.F32.{match[1]}.{match[2]}".upper(): 1}
        return native if arch == "sm_89" else {"HMMA.16816.F32": 2, "FADD": 4}
    if match := re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32\.(e4m3|e5m2)\.(e4m3|e5m2)", word):
        return {f"QGMMA.64x{match[1]}x32.F32.{match[2].upper()}.{match[3].upper()}": 1}
    raise AssertionError(f"say here what {word} becomes on {arch}")


def products(ptx: str, arch: str) -> dict[str, int]:
    """Words of machine code that the multiplications of matrices in ``ptx`` make."""
    made: Counter[str] = Counter()
    for word in re.findall(r"\b(?:wg)?mma\.[.\w]*m\d+n\d+k\d+[.\w]*", ptx):
        made.update(product(word, arch))
    return dict(made)


def entry_of(ptx: str, name: str) -> str:
    """The part of ``ptx`` between the name of the entry and that of the next one."""
    return re.split(rf"\.entry {name}\(", ptx)[1].split(".entry ")[0]


@cache
def built(kernel, arch):
    """(PTX of the kernel, its code)."""
    made = compiled(kernel.text, kernel.file, arch)
    return entry_of(made.ptx, kernel.entry), instructions(disassembled(made.cubin, kernel.entry))


@pytest.mark.parametrize(("kernel", "arch"), PAIRS)
def test_it_rounds_where_the_text_says_flushes_nothing_and_has_the_stack_of_the_table(kernel, arch):
    ptx, code = built(kernel, arch)
    [stack] = [row.stack_bytes for row in kept() if (row.kernel, row.arch) == (kernel.entry, arch)]
    assert len(code) > 20
    assert not complaints(code, ARITHMETIC[kernel.file], products(ptx, arch), stack)


@pytest.mark.parametrize(("kernel", "arch"), PAIRS)
def test_products_of_matrices_are_the_words_that_the_target_has(kernel, arch):
    ptx, code = built(kernel, arch)
    expected = {word: n for word, n in products(ptx, arch).items() if MATRIX.match(word)}
    found = Counter(one.opcode for one in code if MATRIX.match(one.opcode) and not is_move(one))
    assert expected == found


@pytest.mark.parametrize("arch", FP4_SUMS.arches)
def test_fp4_has_int8_products_on_every_target(arch):
    _, code = built(FP4_SUMS, arch)
    assert [one.opcode for one in code if MATRIX.match(one.opcode)] == ["IMMA.16832.S8.S8"] * 16


@pytest.mark.parametrize("kernel", FP8_WGMMA.values(), ids=lambda kernel: kernel.entry)
def test_hopper_multiplies_by_qgmma_what_tma_loads(kernel):
    _, code = built(kernel, "sm_90a")
    words = Counter(one.opcode.split(".")[0] for one in code)
    assert (4, 0, 0) == (words["QGMMA"], words["HGMMA"], words["HMMA"])
    assert min(words["UTMALDG"], words["SYNCS"], words["WARPGROUP"]) > 0


@pytest.mark.parametrize(("arch", "native"), [("sm_89", True), ("sm_90a", False), ("sm_100a", False)])
def test_fp8_is_native_on_ada_and_lowered_to_float16_later(arch, native):
    entries = [kernel for kernel in KERNELS if kernel.file == "fp8_mma.cu"]
    assert len(entries) == 8
    for kernel in entries:
        _, code = built(kernel, arch)
        count = Counter(one.opcode.split(".")[0] for one in code)
        words = ("QMMA", "HMMA", "F2FP")
        assert [bool(count[word]) for word in words] == [native, not native, not native]


@pytest.mark.parametrize(("kernel", "arch"), [pair for pair in PAIRS if pair.values[0].file in WIDE])
def test_what_lies_together_moves_by_sixteen_bytes(kernel, arch):
    _, code = built(kernel, arch)
    assert WIDE[kernel.file] <= {one.opcode for one in code}


@pytest.mark.parametrize(("kernel", "arch"), PAIRS)
def test_every_line_of_code_is_read_and_belongs_to_an_entry(kernel, arch):
    made = compiled(kernel.text, kernel.file, arch)
    text = disassembled(made.cubin, kernel.entry)
    assert len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", text, re.MULTILINE)) == len(instructions(text))
    with pytest.raises(KernelBuildError) as error:
        disassembled(made.cubin, "other")
    named = str(error.value).partition("its entries: ")[2].split(", ")
    assert sorted(named) == sorted(one.entry for one in KERNELS if one.file == kernel.file)


SUM = "x[0] = x[1] * x[2] + x[3];"
KEPT = "float a[400]; for (int i = 0; i < 400; i++) a[i] = x[i] * x[n + i]; x[n] = a[n & 255] + a[(int)x[n] & 255];"
HALVES = 'asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x[0]) : "r"(x[1]), "r"(x[2]), "r"(x[3]));'
F32, F64 = {"add.rn.f32", "mul.rn.f32"}, {"add.rn.f64", "mul.rn.f64"}
SAMPLES = {  # name: type of x, code, what may round
    "sum": ("float", SUM, F32),
    "sum64": ("double", SUM, F64),
    "less": ("float", "x[0] = x[1] < x[2] ? x[3] : x[4];", F32),
    "least": ("float", "x[0] = fminf(x[1], x[2]);", F32),
    "roughly": ("float", "x[0] = __fdividef(x[1], x[2]);", F32),
    "power": ("float", "x[0] = __expf(x[1]);", F32),
    "integers": ("float", "x[n] = x[n / (int)x[0]];", F32),
    "long_integers": ("float", "x[n] = x[(n * 3ll) % (long long)x[0]];", F32),
    "quotient": ("float", "x[0] = x[1] / x[2];", {"div.rn.f32"}),
    "quotient64": ("double", "x[0] = x[1] / x[2];", {"div.rn.f64"}),
    "root64": ("double", "x[0] = sqrt(x[1]);", {"sqrt.rn.f64"}),
    "hidden_root": ("double", "x[0] = sqrt(x[1]);", F64 | {"fma.rn.f64"}),
    "hidden_quotient": ("float", "x[0] = x[1] / x[2];", F32),
    "kept": ("float", KEPT, F32),
    "halves": ("unsigned", HALVES, F32),
}
WRONG = {  # options, then sample: what is wrong with it
    (): {
        "roughly": {"MUFU.RCP"},
        "power": {"MUFU.EX2"},
        "kept": {"LDL", "STL"},
        "halves": {"HFMA2"},
        "hidden_quotient": {"MUFU.RCP", "FCHK", "FFMA", "div_rn_noftz_f32_slowpath"},
        "hidden_root": {"MUFU.RSQ64H", "dsqrt_rn_f64_mediumpath_v1"},
    },
    ("--fmad=true",): {"sum": {"FFMA"}, "sum64": {"DFMA"}},
    ("--ftz=true",): {
        "sum": {"FMUL.FTZ", "FADD.FTZ"},
        "less": {"FSETP.GEU.FTZ.AND"},
        "least": {"FMNMX.FTZ"},
        "quotient": {"div_rn_ftz_f32_slowpath"},
    },
}


@cache
def samples(arch, options):
    text = "".join(
        f'extern "C" __global__ void {name}({kind}* x, int n) {{ {body} }}\n'
        for name, (kind, body, _) in SAMPLES.items()
    )
    return compile_cubin(text, arch, options=options).cubin


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("options", WRONG)
def test_the_check_can_fail(options, arch):
    for name, (_, _, arithmetic) in SAMPLES.items():
        wrong = complaints(instructions(disassembled(samples(arch, options), name)), arithmetic, {})
        plain = {re.sub(r"^(LDL|STL)\b.*|^.*\$__cuda_sm\d\w_", r"\1", word) for word in wrong}
        assert not set(WRONG[options].get(name, ())) - plain, name
        if not options:
            assert plain == WRONG[()].get(name, set()), name


def test_a_product_of_matrices_that_no_line_names_is_seen():
    with pytest.raises(AssertionError, match=r"say here what mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"):
        products("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}", "sm_90a")
    fp8 = FP8_MMA_SYNC.format("e4m3", "e5m2") + " {%f1};"
    assert {"QMMA.16832.F32.E4M3.E5M2": 2} == products(2 * fp8, "sm_89")
    lowered = products(fp8, "sm_90a")
    assert {"HMMA.16816.F32": 2, "FADD": 4} == lowered
    added = [Instruction("", "", "FADD", ("R0", "R1", "R2"))] * 4
    assert not complaints(added, set(), lowered)
    assert {"FADD"} == complaints([*added, added[0]], set(), lowered)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
@pytest.mark.parametrize(
    ("kernel", "old", "lost"),
    [
        (ENCODE, "qsim_aligned(row + j, 16)) {\n        const float4", "LDG.E.128"),
        (ENCODE, "qsim_aligned(row + j, 4)", "STG.E"),
        (DECODE, "qsim_aligned(row + j, 16)) {\n        const uint4", "LDG.E.128"),
        (DECODE, "qsim_aligned(row + j, 16)) {\n        *reinterpret_cast<float4*>", "STG.E.128"),
        (FP4_SUMS, "bytes % 16 == 0", "LDG.E.128"),
    ],
)
def test_a_text_that_moves_element_by_element_is_seen(kernel, old, lost, arch):
    assert kernel.text.count(old) == 1
    text = kernel.text.replace(old, re.sub(r"^qsim_aligned\(row \+ j, \d+\)|^bytes % 16 == 0", "false", old))
    code = instructions(disassembled(compile_cubin(text, arch).cubin, kernel.entry))
    assert lost in WIDE[kernel.file] - {one.opcode for one in code}


def test_a_missing_disassembler_and_no_cubin_are_named(monkeypatch):
    with pytest.raises(KernelBuildError, match="nvdisasm could not read the cubin"):
        disassembled(b"no cubin", "f")
    monkeypatch.setattr(_sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(KernelBuildError, match="nvdisasm was not found: install nvidia-cuda-nvdisasm"):
        disassembled(b"another", "f")
