"""A hook of mkdocs: notebooks are pages, and every page links to the repository."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

SUFFIX = ".ipynb"
HOME = "index.md"
NO_REPOSITORY = (
    "covprop has no public repository yet: its source is the clone that this site was built from."
)
SSH = re.compile(r"^(?:ssh://)?git@([^:/]+)[:/]")


def markdown(notebook: dict[str, Any]) -> str:
    """Cells as Markdown: code in blocks of Python, what it printed in blocks of text below."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return [source]
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        if "text" in output:
            parts.append(f"```text\n{''.join(output['text'])}```")
        else:
            picture = output["data"]["image/png"].replace("\n", "")
            parts.append(f'<img alt="figure" src="data:image/png;base64,{picture}">')
    return parts


def web_address(remote: str) -> str:
    """Of a remote repository, for a browser; empty where it has none."""
    url = SSH.sub(r"https://\1/", remote.strip()).removesuffix("/").removesuffix(".git")
    return url if url.startswith("https://") else ""


def declared(pyproject: str) -> str:
    """The address under `Repository` in the text of pyproject.toml; empty where it has none."""
    return web_address(tomllib.loads(pyproject)["project"].get("urls", {}).get("Repository", ""))


def _remote() -> str:
    """The address of the remote repository that git knows; empty where it has none."""
    if not shutil.which("git"):
        return ""
    command = ["git", "remote", "get-url", "origin"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return web_address(told.stdout)


def on_config(config: Any) -> Any:
    """Link to the repository that the package declares, or else to that of git."""
    pyproject = Path(config.config_file_path).with_name("pyproject.toml")
    if url := declared(pyproject.read_text()) or _remote():
        config.repo_url = url
        config.repo_name = "/".join(url.split("/")[-2:])
    return config


def on_files(files: Any, config: Any) -> Any:  # noqa: ARG001
    """Take notebooks as pages, not as files to copy."""
    for file in files:
        if file.src_uri.endswith(SUFFIX):
            file.is_documentation_page = lambda: True
            for known in ("dest_uri", "url", "abs_dest_path"):
                vars(file).pop(known, None)
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """The home page says why no page links to the repository, where none does."""
    told = page.file.src_uri != HOME or config.repo_url
    return text if told else f"{text}\n\n{NO_REPOSITORY}\n"


def on_page_read_source(page: Any, config: Any) -> str | None:  # noqa: ARG001
    """The text of a notebook."""
    if not page.file.src_uri.endswith(SUFFIX):
        return None
    return markdown(json.loads(page.file.content_string))
