"""How each coding agent is found, and run headless over one prompt: command lines, settings, environment."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mk.config import AgentConfig
from mk.errors import MkError
from mk.results.sources import ROOT

INSTALLED = ROOT / "build" / "agents"  # by `make agents`
BESIDE_PATH = (INSTALLED / "node_modules" / ".bin", INSTALLED / "aider" / "bin")
KEPT = ("PATH", "LANG", "LC_ALL", "TZ")  # of the environment, which may hold secrets
OWN = ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TMPDIR")
COMMITS = {f"GIT_{who}_{what}": "agent@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
DEFAULT_CONTEXT = 32768  # tokens, of a server that does not say


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent works, and whom it asks. folder: the project. home: a folder for everything else that it writes.
    base_url: with /v1. context: tokens."""

    folder: Path
    home: Path
    base_url: str
    model: str
    context: int

    def environment(self) -> dict[str, str]:
        """All that a program here gets of one."""
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        own = {name: str(self.home / name) for name in OWN}
        for path in own.values():
            Path(path).mkdir(parents=True, exist_ok=True)
        return {**kept, **own, **COMMITS, "PWD": str(self.folder), "TERM": "dumb", "NO_COLOR": "1"}


@dataclass(frozen=True, slots=True)
class Launch:
    """arguments: of the run over the prompt. before: of calls that set the agent up for it."""

    arguments: list[str]
    env: Mapping[str, str]
    before: list[list[str]] = field(default_factory=list)


def find(config: AgentConfig) -> Path:
    """The agent's program. Raises MkError, with how to install it, where there is none."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, BESIDE_PATH)])
    found = shutil.which(config.program or "", path=path)
    if found is None:
        raise MkError(
            f"agent={config.name}: there is no program {config.program}",
            hint="make agents installs it in build/agents; agent.program=<path> names another",
        )
    return Path(found).absolute()


def opencode(place: Place, prompt: str, limit_s: float) -> Launch:
    settings = {
        **opencode_settings(place.base_url, place.model, place.context, "none"),
        "permission": {"edit": "allow", "bash": "allow", "external_directory": "allow"},
    }
    path = place.home / "opencode.json"
    path.write_text(json.dumps(settings))
    env = {
        "OPENCODE_CONFIG": str(path),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    return Launch(["run", prompt], env)


def opencode_settings(base_url: str, model: str, context: int, key: str) -> dict[str, Any]:
    """opencode.json for a server. key: of it, or how OpenCode finds it."""
    limit = {"context": context, "output": context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mini-mk",
        "options": {"baseURL": base_url, "apiKey": key},
        "models": {model: {"name": model, "reasoning": True, "tool_call": True, "limit": limit}},
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"mini-mk": provider},
        "model": f"mini-mk/{model}",
    }


def cline(place: Place, prompt: str, limit_s: float) -> Launch:
    known = ["auth", "-p", "openai", "-k", "none", "-m", place.model, "-b", place.base_url]
    env = {"CLINE_NO_AUTO_UPDATE": "1", "CLINE_TELEMETRY_DISABLED": "1"}
    return Launch(["-t", str(max(1, round(limit_s))), prompt], env, [known])


def aider(place: Place, prompt: str, limit_s: float) -> Launch:
    """With every file of the project in its chat: headless it asks for none."""
    files = sorted(str(path) for path in place.folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    quiet = ["--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-pretty", "--no-gitignore"]
    chosen = ["--yes-always", "--no-auto-commits", "--no-suggest-shell-commands", "--no-detect-urls"]
    model = ["--model", f"openai/{place.model}", "--edit-format", "whole", "--map-tokens", "0"]
    env = {"OPENAI_API_BASE": place.base_url, "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return Launch([*quiet, *chosen, *model, "--message", prompt, *files], env)


PROGRAMS: dict[str, Callable[[Place, str, float], Launch]] = {"opencode": opencode, "cline": cline, "aider": aider}
