"""A hook of mkdocs: notebooks are pages, and the link to the repository is that of git."""

import json
import re
import shutil
import subprocess
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
    url = SSH.sub(r"https://\1/", remote.strip()).removesuffix(".git")
    return url if url.startswith("https://") else ""


def on_config(config: Any) -> Any:
    """Where git knows a remote repository, the pages link to it."""
    if shutil.which("git"):
        command = ["git", "remote", "get-url", "origin"]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        if url := web_address(told.stdout):
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
