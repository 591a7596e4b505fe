"""From a configuration to a service: its fingerprint, and the model's own defaults of sampling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mk.compose import load_config
from mk.errors import MkError
from mk.model import files
from mk.model.opening import NANO, open_model
from mk.server.generation import Service, generation_params
from mk.server.launch import build_service, fingerprint, listen
from mk.server.protocol import ChatRequest

SERVE = ["experiment=serve", "engine=interpreter", "server.context=256", "server.slots=2"]


def of(tmp_path: Path, *overrides: str, library: str = "a library") -> str:
    config = load_config([*SERVE, *overrides])
    return fingerprint(config, open_model(config.model, config.weights, tmp_path), library)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(NANO, tmp_path / "another"))


@pytest.mark.parametrize(
    "override",
    [
        "server.port=8001",
        "server.host=0.0.0.0",
        "server.model_id=other",
        "server.drain_s=3",
        "server.max_waiting=7",
        "run_dir=elsewhere",
        "debug=true",
        "logger=wandb",
        "batch.size=2",
    ],
)
def test_the_fingerprint_is_the_same_wherever_it_is_served(tmp_path: Path, override: str) -> None:
    assert of(tmp_path, override) == of(tmp_path)


def test_the_fingerprint_is_the_same_wherever_the_model_lies(tmp_path: Path, copied: Path) -> None:
    assert of(tmp_path, f"model.path={copied}") == of(tmp_path)


@pytest.mark.parametrize(
    "override",
    [
        "wave_order=router_first",
        "placement=dependency_affinity",
        "schedule=greedy",
        "engine.numerics=kernel",
        "prefill.chunk=64",
        "server.slots=3",
        "weights=random",
        "engine.prefix_cache.generated=false",
    ],
)
def test_the_fingerprint_tells_configurations_apart(tmp_path: Path, override: str) -> None:
    assert of(tmp_path, override) != of(tmp_path)


def test_the_fingerprint_tells_libraries_apart(tmp_path: Path) -> None:
    assert of(tmp_path, library="another") != of(tmp_path)


def matrices(path: Path) -> dict[str, tuple[int, int]]:
    """Where the tensors of a safetensors file that are no vectors begin and end, in bytes of the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {name: entry for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) > 1}
    return {name: tuple(8 + length + at for at in entry["data_offsets"]) for name, entry in found.items()}  # type: ignore[misc]


def flip(path: Path, begin: int, end: int) -> None:
    data = bytearray(path.read_bytes())
    data[begin:end] = bytes(byte ^ 1 for byte in data[begin:end])
    path.write_bytes(data)


@pytest.mark.parametrize("sampled", [False, True], ids=["a byte", "a matrix of a large file"])
def test_the_fingerprint_tells_weights_apart(
    tmp_path: Path, copied: Path, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other values under the same names and sizes, far behind the beginning of the file."""
    stride = 1 << 16
    if sampled:
        monkeypatch.setattr(files, "WHOLE", 0)
        monkeypatch.setattr(files, "STRIDE", stride)
    before = of(tmp_path, f"model.path={copied}")
    weights = copied / "model.safetensors"
    begin, end = max(span for span in matrices(weights).values() if span[1] - span[0] >= stride)
    assert begin > 1 << 20
    flip(weights, begin, end if sampled else begin + 1)
    assert of(tmp_path, f"model.path={copied}") != before


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_the_fingerprint_tells_templates_and_defaults_apart(tmp_path: Path, copied: Path, name: str) -> None:
    file = copied / name
    file.write_text(file.read_text() + "\n")
    assert of(tmp_path, f"model.path={copied}") != of(tmp_path)


def built(tmp_path: Path, *overrides: str) -> Service:
    config = load_config([*SERVE, *overrides])
    return build_service(config, open_model(config.model, config.weights, tmp_path))


def defaulting(folder: Path, **generation: object) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 4, "bos_token_id": 2, **generation}))


def test_a_service_has_the_models_defaults_and_fingerprint(tmp_path: Path, copied: Path) -> None:
    defaulting(copied, temperature=0.3, top_k=7, top_p=0.5, min_p=0.1, repetition_penalty=1.3, max_length=20)
    service = built(tmp_path, f"model.path={copied}")
    config = load_config([*SERVE, f"model.path={copied}"])
    model = open_model(config.model, config.weights, tmp_path)
    assert service.fingerprint == fingerprint(config, model, service.worker.core.engine.name)

    def params(**asked: object) -> tuple[float, ...]:
        request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], **asked})
        given = generation_params(service, request, 0, 0, 5, None)
        drawn = given.sampling
        return drawn.temperature, drawn.top_k, drawn.top_p, given.min_p, given.repetition_penalty

    assert params() == (0.3, 7, 0.5, 0.1, 1.3)
    own = {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert params(**own) == (1.5, 0, 1.0, 0, 1)
    defaulting(copied, temperature=0.3, do_sample=False)
    assert built(tmp_path, f"model.path={copied}").defaults == {"temperature": 0.0}


def test_the_hint_for_an_address_is_what_helps() -> None:
    """A port that is taken, a host that is nobody's, one that does not resolve."""
    with listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        held.listen()
        with pytest.raises(MkError, match=rf"127\.0\.0\.1:{port} cannot be listened on") as caught:
            listen("127.0.0.1", port)
        assert caught.value.hint == f"server.port={port % 65535 + 1}, or stop what uses it"
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(MkError, match="cannot be listened on") as caught:
            listen(host, 0)
        assert caught.value.hint == "server.host=127.0.0.1"
