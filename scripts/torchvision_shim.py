"""Makes `import torchvision` work when its compiled half does not fit the installed torch.

A CUDA build of torchvision beside a CPU build of torch cannot load its C++ operators, and its import then dies with
`operator torchvision::nms does not exist`; transformers' image processors and vLLM's vision models go down with it.
They use only the transforms, which are plain torch. So, just before torchvision is imported, this module declares
the operators that torchvision attaches shape functions to. Calling one of them still fails; importing does not.

scripts/install.sh copies this file into the environment's site-packages, next to a `.pth` file that imports it when
Python starts, so that vLLM's worker processes get it as well. It does so only where the import fails, and the module
steps aside by itself where the compiled half loads. Only the standard library is imported here: this runs at every
start of Python.
"""

import importlib.machinery
import re
import sys
from pathlib import Path

LIBRARIES = []  # torch.library.Library objects take their operators with them when they are collected


def declare_operators(package_dir):
    """Declare, without an implementation, each operator named in torchvision's `_meta_registrations.py`."""
    import torch

    for compiled in package_dir.glob("_C*.so"):
        try:
            torch.ops.load_library(str(compiled))
            return  # a proper build: declaring its operators again would be the error
        except OSError:
            continue
    source = (package_dir / "_meta_registrations.py").read_text(encoding="utf-8")
    names = re.findall(r'register_(?:meta|fake)\(\s*"(?:torchvision::)?(\w+)"', source)
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in dict.fromkeys(names):
        library.define(f"{name}() -> ()")
    LIBRARIES.append(library)


class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        declare_operators(Path(self.path).parent)
        super().exec_module(module)


class Finder:
    """Changes nothing but torchvision's loader; looking for torchvision without importing it stays cheap."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder)
