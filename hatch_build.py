"""The hook of hatchling that builds the compiled kernels into the wheel."""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path("src/covprop/native/build.py")


class CompiledKernels(BuildHookInterface):
    """Builds them where there is a compiler; a wheel without them runs on any machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and name the platform of the wheel after what it contains."""
        del version
        if self.target_name != "wheel":
            return
        spec = importlib.util.spec_from_file_location("build_kernels", Path(self.root) / BUILD)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        libraries = module.build()
        if libraries:
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system}"
            build_data["artifacts"] += [f"src/covprop/native/{path.name}" for path in libraries]
