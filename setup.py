"""Builds attn_ext's two libraries with a compile table of its own.

torch's BuildExtension would compile .c files as C++ and has one flag list for all files; here each
file gets its language, instruction set and GPU architecture from COMPILE_TABLE.

    attn_ext/_C.abi3.so       schemas and CPU kernels; needs libtorch_cpu only
    attn_ext/_C_cuda.abi3.so  CUDA kernels; static cudart, so one build serves CUDA 12 and 13

Both use the stable ABI of Python (3.10) and of torch (2.10): one build runs on every later version.

Environment
    ATTN_EXT_CUDA   auto (default: build CUDA where nvcc is), 1 (fail without nvcc), 0 (never)
    ATTN_EXT_ARCHS  GPU architectures with machine code of their own, some of 80, 90a, 100, 120;
                    default "80;90a". PTX of compute_80 serves every other GPU. "native" is what the
                    GPUs of this machine need, and the default where it has none.
                    TORCH_CUDA_ARCH_LIST, where set, narrows it further
    ATTN_EXT_LINEINFO=1  source lines in the CUDA library, for ncu
    ATTN_EXT_ALLOW_SPILLS=1  let a tensor-core kernel pass that spills, while it is being tuned
    CC, CXX, NVCC, MAX_JOBS as usual
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
TORCH_FLOOR = (2, 10)
X86 = platform.machine() in ("x86_64", "AMD64")

WARN = ["-Wall", "-Wextra", "-Wno-attributes"]
SHARED = ["-O3", "-fPIC", "-fvisibility=hidden", f"-fmacro-prefix-map={CSRC}/="]
C_FLAGS = ["-std=c11", "-fno-math-errno", "-ffp-contract=fast", *SHARED, *WARN]
CXX_FLAGS = ["-std=c++20", "-fvisibility-inlines-hidden", *SHARED, *WARN]
NVCC_FLAGS = ["-O3", "-std=c++17", "-DNDEBUG", "-Xptxas=-v", "-compress-mode=size"]
NVCC_FLAGS += ["-Xcompiler=-fPIC,-fvisibility=hidden"]

# One text, one build for each instruction set; cpu/select.c takes the best that the CPU runs.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
ISAS = {"base": []}
if X86:
    ISAS |= {"avx2": AVX2, "avx512": AVX512}

# GPU architectures that ATTN_EXT_ARCHS may name, and the machine code of the portable kernels for
# each: it runs within one major version only. 90a has the Hopper kernels on top.
PORTABLE = {"80": "sm_80", "90a": "sm_90", "100": "sm_100", "120": "sm_120"}
DEFAULT_ARCHS = ["80", "90a"]

# library, pattern below csrc, compiler, variants (name -> flags). The first match decides.
CPU_VARIANTS = {isa: [f"-DATTN_ISA={isa}", *flags] for isa, flags in ISAS.items()}
COMPILE_TABLE = [
    ("_C", "binding/library.cpp", "cxx", {"": []}),
    ("_C_cuda", "binding/library_cuda.cpp", "cxx", {"": ["-DUSE_CUDA"]}),
    (None, "cpu/ref.c", "", {}),  # the tests' oracle
    ("_C", "cpu/select.c", "cc", {"": []}),
    ("_C", "cpu/*.c", "cc", CPU_VARIANTS),
    ("_C_cuda", "cuda/*.c", "cc", {"": []}),
    ("_C_cuda", "cuda/*_sm90*.cu", "nvcc", {"": ["hopper"]}),
    ("_C_cuda", "cuda/*.cu", "nvcc", {"": ["portable"]}),
]


def fail(message: str) -> NoReturn:
    sys.exit(f"attn_ext: {message}")


def torch_dir() -> Path | None:
    """The folder of torch: of this interpreter, or of the environment around an isolated build."""
    paths = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = (Path(path) / "torch" for path in paths if path)
    return next((path for path in found if (path / "version.py").is_file()), None)


def torch_version(torch: Path) -> tuple[str, str | None]:
    """(version, CUDA version or None), read without importing torch."""
    values: dict[str, object] = {}
    text = (torch / "version.py").read_text()
    for name, value in re.findall(r"^(\w+)(?:\s*:[^=\n]+)? = (.+)$", text, re.MULTILINE):
        values[name] = value.strip("'\"")
    cuda = values.get("cuda")
    return str(values.get("__version__")), None if cuda in (None, "None") else str(cuda)


def require_torch() -> Path:
    torch = torch_dir()
    if torch is None:
        fail("torch is not installed: pip install 'torch>=2.10', then build again")
    version = torch_version(torch)[0]
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < TORCH_FLOOR:
        fail(f"expected torch >= {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]}, got {version} in {torch}")
    if not (torch / "include/torch/csrc/stable/library.h").is_file():
        fail(f"torch {version} in {torch} has no C++ headers (include/torch/csrc/stable)")
    return torch


def compiler(variable: str, default: str, needed_for: str) -> list[str]:
    command = shlex.split(os.environ.get(variable, default))
    if shutil.which(command[0]) is None:
        fail(f"{command[0]} not found; {needed_for} needs it (set {variable} to name another)")
    return command


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which(os.environ.get("NVCC", "nvcc")) or shutil.which(f"{home}/bin/nvcc")


def cuda_home(nvcc: str) -> Path:
    """The toolkit that this nvcc belongs to; nvcc itself says it, since it may be a wrapper."""
    command = [nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    home = Path(top.group(1).strip()).resolve() if top else Path(nvcc).resolve().parents[1]
    if not (home / "include/cuda_runtime_api.h").is_file():
        fail(f"{nvcc}: expected CUDA headers in {home}/include, found none")
    return home


def static_cudart(home: Path) -> Path:
    found = [home / lib / "libcudart_static.a" for lib in ("lib64", "lib")]
    found += sorted(home.glob("targets/*/lib/libcudart_static.a"))
    path = next((path for path in found if path.is_file()), None)
    return path or fail(f"libcudart_static.a not found below {home}")


def native_archs() -> list[str]:
    """The architectures of the GPUs here, or the default where there are none or none is known."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return DEFAULT_ARCHS
    majors = {line.split(".")[0] for line in said.split()}
    return [arch for arch in PORTABLE if major_of(arch) in majors] or DEFAULT_ARCHS


def major_of(arch: str) -> str:
    return arch.rstrip("a")[:-1]


def cuda_archs() -> list[str]:
    """The architectures of ATTN_EXT_ARCHS, narrowed by TORCH_CUDA_ARCH_LIST where that is set."""
    named = os.environ.get("ATTN_EXT_ARCHS", ";".join(DEFAULT_ARCHS)).strip()
    asked = native_archs() if named == "native" else re.split(r"[;,\s]+", named)
    unknown = [arch for arch in asked if arch not in PORTABLE]
    if unknown:
        known = ", ".join(PORTABLE)
        fail(f"ATTN_EXT_ARCHS: expected native or some of {known}; got {', '.join(unknown)}")
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if listed:
        majors = set(re.findall(r"(\d+)\.\d", listed))
        kept = [arch for arch in asked if major_of(arch) in majors]
        if not kept and any(int(major) >= 8 for major in majors):
            kept = asked[:1]  # its PTX serves the GPUs listed
        if not kept:
            fail(
                f"TORCH_CUDA_ARCH_LIST={listed} leaves none of the architectures of ATTN_EXT_ARCHS"
            )
        asked = kept
    return asked


def gencode(kernels: str, archs: list[str]) -> list[str]:
    """nvcc's flags for the portable or the Hopper kernels; none where they are not wanted."""
    if kernels == "hopper":
        return ["-gencode=arch=compute_90a,code=sm_90a"] if "90a" in archs else []
    code = ",".join([*(PORTABLE[arch] for arch in archs), "compute_80"])
    return [f"-gencode=arch=compute_80,code=[{code}]"]


def want_cuda() -> str | None:
    """nvcc's path where the CUDA library is to be built, else None; says which, and why."""
    mode = os.environ.get("ATTN_EXT_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        fail(f"ATTN_EXT_CUDA: expected auto, 0 or 1; got {mode}")
    nvcc = find_nvcc() if mode != "0" else None
    if mode == "1" and nvcc is None:
        fail("ATTN_EXT_CUDA=1, but nvcc was not found (CUDA_HOME, NVCC or PATH)")
    if nvcc is None:
        reason = "ATTN_EXT_CUDA=0" if mode == "0" else "no nvcc; ATTN_EXT_CUDA=1 insists"
        print(f"attn_ext: building the CPU library only ({reason})")
    return nvcc


def report_cuda(nvcc: str, torch: Path, archs: list[str]) -> None:
    release = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    toolkit = re.search(r"release (\d+\.\d+)", release.stdout)
    version = toolkit.group(1) if toolkit else "unknown"
    torch_cuda = torch_version(torch)[1]
    print(f"attn_ext: CUDA library for {', '.join(archs)} with nvcc {version}")
    if torch_cuda is None:
        gpu = (
            "; a GPU is here: install a CUDA build of torch"
            if Path("/dev/nvidia0").exists()
            else ""
        )
        print(f"attn_ext: torch here has no CUDA, so the library will not be loaded{gpu}")
    elif torch_cuda.split(".")[0] != version.split(".")[0]:
        print(
            f"attn_ext: nvcc is {version}, torch has CUDA {torch_cuda}; cudart is static, "
            f"so this works if the driver supports CUDA {version.split('.')[0]}"
        )


@dataclass
class Unit:
    """One object file: how it is made, and what the compiler said of it."""

    source: Path
    output: Path
    command: list[str]
    tensor_core: bool = False  # spills and serialised wgmma fail the build
    depfile: Path = field(init=False)
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.depfile = self.output.with_suffix(".d")
        self.log = self.output.with_suffix(".log")

    def stale(self) -> bool:
        """Whether the object is older than anything it was made from, or was made otherwise."""
        if not (self.output.exists() and self.depfile.exists() and self.log.exists()):
            return True
        if self.log.read_text().partition("\n")[0] != shlex.join(self.command):
            return True
        made = self.output.stat().st_mtime
        named = self.depfile.read_text().replace("\\\n", " ").partition(": ")[2].split()
        return any(not Path(name).exists() or Path(name).stat().st_mtime > made for name in named)

    def build(self) -> None:
        if not self.stale():
            return
        self.output.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.write(f"attn_ext: {self.source.relative_to(ROOT)} -> {self.output.name}\n")
        done = subprocess.run(self.command, capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode:
            self.output.unlink(missing_ok=True)
            raise RuntimeError(f"{shlex.join(self.command)}\n{said}")
        strict = self.tensor_core and os.environ.get("ATTN_EXT_ALLOW_SPILLS") != "1"
        if strict and (complaint := ptxas_complaint(said)):
            self.output.unlink(missing_ok=True)
            raise RuntimeError(f"{self.source.relative_to(ROOT)}: {complaint}\n{said}")
        self.log.write_text(f"{shlex.join(self.command)}\n{said}")
        if warnings := [line for line in said.splitlines() if "warning" in line.lower()]:
            print("\n".join(warnings))


def ptxas_complaint(said: str) -> str | None:
    """Why a tensor-core kernel must not ship: a spill, a stack frame, a serialised wgmma."""
    if serialised := re.search(r"C7508|C7510", said):
        return f"ptxas reports {serialised.group(0)}"
    kernel = ""
    for line in said.splitlines():
        if named := re.search(r"Function properties for (\w+)", line):
            kernel = named.group(1)
        found = re.search(r"[1-9]\d* bytes (?:stack frame|spill stores|spill loads)", line)
        if found:
            return f"ptxas reports {found.group(0)} in {kernel}"
    return None


class BuildExt(build_ext):
    """Compiles by COMPILE_TABLE, links both libraries, skips what is up to date."""

    def run(self) -> None:
        torch = require_torch()
        tools = {
            "cc": compiler("CC", "gcc", "the C kernels"),
            "cxx": compiler("CXX", "g++", "the binding"),
        }
        archs: list[str] = []
        if nvcc := want_cuda():
            archs = cuda_archs()
            tools["nvcc"] = [nvcc]
            report_cuda(nvcc, torch, archs)
        units = self.units(torch, tools, archs)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        try:
            with ThreadPoolExecutor(jobs) as pool:
                # Largest sources first: the kernels that take longest must not start last.
                ordered = sorted(
                    [unit for members in units.values() for unit in members],
                    key=lambda unit: "inst" not in str(unit.source),
                )
                list(pool.map(Unit.build, ordered))
            for library, members in units.items():
                self.link(library, members, torch, tools)
        except RuntimeError as error:
            fail(str(error))

    def units(
        self, torch: Path, tools: dict[str, list[str]], archs: list[str]
    ) -> dict[str, list[Unit]]:
        build = ROOT / self.build_temp
        python = sysconfig.get_path("include")
        cxx = [f"-isystem{torch}/include", f"-I{python}", "-DPy_LIMITED_API=0x030A0000"]
        cxx += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
        flags = {"cc": C_FLAGS, "cxx": [*CXX_FLAGS, *cxx], "nvcc": NVCC_FLAGS}
        if "nvcc" in tools:
            include = f"-isystem{cuda_home(tools['nvcc'][0])}/include"
            hopper = ["-DATTN_SM90"] if "90a" in archs else []
            flags["cc"] = [*flags["cc"], include, *hopper]
            flags["cxx"] = [*flags["cxx"], include]
        if os.environ.get("ATTN_EXT_LINEINFO") == "1":
            flags["nvcc"] = [*flags["nvcc"], "-lineinfo"]

        units: dict[str, list[Unit]] = {"_C": [], "_C_cuda": []} if archs else {"_C": []}
        for source in sorted(CSRC.rglob("*.c*")):
            name = source.relative_to(CSRC).as_posix()
            if source.suffix not in (".c", ".cpp", ".cu"):
                continue
            row = next((row for row in COMPILE_TABLE if fnmatch(name, row[1])), None)
            if row is None:
                fail(f"csrc/{name} matches no row of COMPILE_TABLE in setup.py")
            library, _, tool, variants = row
            if library not in units:
                continue
            for variant, extra in variants.items():
                if tool == "nvcc":
                    extra = gencode(extra[0], archs)
                    if not extra:
                        continue
                suffix = f".{variant}.o" if variant else ".o"
                output = build / library / Path(name).with_suffix(suffix)
                depend = ["-MD", "-MF", str(output.with_suffix(".d"))]
                command = [*tools[tool], *flags[tool], *extra, f"-I{CSRC}", *depend]
                command += ["-c", str(source), "-o", str(output)]
                tensor_core = tool == "nvcc" and "_sm" in name
                units[library].append(Unit(source, output, command, tensor_core))
        return units

    def link(
        self, library: str, units: list[Unit], torch: Path, tools: dict[str, list[str]]
    ) -> None:
        target = Path(self.get_ext_fullpath(f"attn_ext.{library}"))
        target.parent.mkdir(parents=True, exist_ok=True)
        objects = [unit.output for unit in units]
        command = [*tools["cxx"], "-shared", "-o", str(target), *map(str, objects)]
        command += ["-Wl,--exclude-libs,ALL", "-Wl,--as-needed", f"-L{torch}/lib", "-ltorch_cpu"]
        if library == "_C_cuda":
            cudart = static_cudart(cuda_home(tools["nvcc"][0]))
            stub = self.libtorch_cuda(tools["cc"])
            command += ["-Wl,--no-as-needed", str(stub), str(cudart), "-ldl", "-lrt", "-lpthread"]
        # The command names the objects: one more or one less makes another library.
        record = ROOT / self.build_temp / f"{library}.link"
        same = record.exists() and record.read_text() == shlex.join(command)
        if same and target.exists():
            made = target.stat().st_mtime
            if made > max(path.stat().st_mtime for path in objects):
                return
        print(f"attn_ext: linking {target.name}", flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
        record.write_text(shlex.join(command))

    def libtorch_cuda(self, cc: list[str]) -> Path:
        """An empty library of that name: a CPU build of torch has none to link with. It records the
        need, and the loader finds the real one that torch has loaded."""
        stub = ROOT / self.build_temp / "stub" / "libtorch_cuda.so"
        if not stub.exists():
            stub.parent.mkdir(parents=True, exist_ok=True)
            named = ["-shared", f"-Wl,-soname,{stub.name}", "-o", str(stub), "-x", "c", "/dev/null"]
            subprocess.run([*cc, *named], check=True)
        return stub

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".abi3.so"

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


setup(
    ext_modules=[Extension(f"attn_ext.{name}", sources=[]) for name in ("_C", "_C_cuda")],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    setup_requires=[] if torch_dir() else ["torch>=2.10"],
    zip_safe=False,
)
