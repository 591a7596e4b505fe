"""Tokenizers: everything from the folder, exact text both ways, whole characters in a stream, and the turn layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mk.errors import MkError
from mk.model.folder import write_model_folder
from mk.model.geometry import PRESETS
from mk.model.synthetic_tokenizer import build_tokenizer
from mk.model.tokenizer import MARKERS, Tokenizer, load_tokenizer
from tests.tiny_model import tiny_geometry

TEXT = "def naïve(x):\n\treturn x + '漢字 🎉'  # \x00\x7f"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model_folder(path, tiny_geometry(vocab=2000), build_tokenizer(2000))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def rewrite(source: Path, target: Path, file: str, **fields: object) -> Path:
    """A copy of a model's folder with some fields of one JSON file replaced."""
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    content = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(content | fields))
    return target


@pytest.mark.parametrize("vocab", [271, 293, 2000, PRESETS["slice"].vocab, PRESETS["north_mini_code"].vocab])
def test_synthetic_tokenizer_has_exactly_the_vocabulary(vocab: int) -> None:
    backend = build_tokenizer(vocab)
    assert backend.get_vocab_size() == vocab
    assert sorted(backend.get_vocab().values()) == list(range(vocab))


@pytest.mark.parametrize("vocab", [270, 10**6])
def test_synthetic_tokenizer_refuses_other_sizes(vocab: int) -> None:
    with pytest.raises(MkError, match=f"vocab={vocab}"):
        build_tokenizer(vocab)


def test_text_survives_and_merges_shorten_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())
    assert tokenizer.encode(TEXT, bos=True) == [tokenizer.bos, *ids]


def test_markers_are_single_tokens(tokenizer: Tokenizer) -> None:
    for name, spellings in MARKERS.items():
        assert tokenizer.encode(spellings[0]) == [tokenizer.marker(name)]
        assert tokenizer.marker(name) in tokenizer.special
    assert tokenizer.decode([tokenizer.marker("start_text"), *tokenizer.encode("a")], skip_special=True) == "a"


def test_stream_sends_whole_characters_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    stream = tokenizer.stream()
    pieces = [stream.step(token) for token in ids]
    assert "".join(pieces) + stream.finish() == TEXT
    assert "" in pieces and not any("\ufffd" in piece for piece in pieces)


def test_stream_of_a_cut_character_equals_decode(tokenizer: Tokenizer) -> None:
    cut = tokenizer.encode("ok 漢")[:-1]
    stream = tokenizer.stream()
    text = "".join(stream.step(token) for token in cut) + stream.finish()
    assert text == tokenizer.decode(cut) and text.startswith("ok ") and text.endswith("\ufffd")


def test_legacy_spelling_is_an_alias(folder: Path, tmp_path: Path) -> None:
    text = (folder / "tokenizer.json").read_text().replace("<|START_TEXT|>", "<|START_RESPONSE|>")
    rewrite(folder, tmp_path, "config.json")
    (tmp_path / "tokenizer.json").write_text(text)
    legacy = load_tokenizer(tmp_path)
    assert legacy.encode("<|START_RESPONSE|>") == [legacy.marker("start_text")]


def test_a_marker_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    text = (folder / "tokenizer.json").read_text().replace("<|START_ACTION|>", "<|OTHER|>")
    rewrite(folder, tmp_path, "config.json")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(MkError, match=r"has no <\|START_ACTION\|> token"):
        load_tokenizer(tmp_path).marker("start_action")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 3}, (7, 9)),
        ({"eos_token_id": 7}, {"eos_token_id": 3}, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": [3, 4]}, (3, 4)),
    ],
)
def test_eos_from_generation_config_then_config(folder: Path, tmp_path: Path, generation, config, expected) -> None:
    rewrite(rewrite(folder, tmp_path, "config.json", **config), tmp_path, "generation_config.json", **generation)
    assert load_tokenizer(tmp_path).eos == expected


def test_eos_from_config_alone(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, tmp_path, "config.json", eos_token_id=11)
    (tmp_path / "generation_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos == (11,) and tokenizer.generation == {}


@pytest.mark.parametrize("eos", [None, 2000, "3", []])
def test_no_usable_eos_is_an_error(folder: Path, tmp_path: Path, eos: object) -> None:
    rewrite(rewrite(folder, tmp_path, "config.json", eos_token_id=None), tmp_path, "generation_config.json")
    rewrite(folder, tmp_path, "generation_config.json", eos_token_id=eos)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MkError, match="eos_token_id="):
        load_tokenizer(tmp_path)


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, tmp_path, "config.json", vocab_size=1999)
    with pytest.raises(MkError, match="more pieces than vocab_size=1999"):
        load_tokenizer(tmp_path)


def test_a_missing_or_broken_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, tmp_path, "config.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MkError, match="tokenizer.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(MkError, match="tokenizer.json: no such file"):
        load_tokenizer(tmp_path)


def test_transformers_reads_the_folder_alike(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Sort a list."}]
    assert theirs.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT)
    assert theirs.decode(tokenizer.encode(TEXT)) == TEXT
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == tokenizer.render(messages)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (tokenizer.eos[0], tokenizer.bos)


def test_turn_layout(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert text.startswith("<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>")
    assert text.endswith(
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|><|START_TEXT|>Hi<|END_TEXT|><|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>"
    )
    for off in ({"reasoning": False}, {"reasoning_effort": "none"}):
        messages = [{"role": "user", "content": "Hi"}]
        assert tokenizer.render(messages, **off).endswith("<|START_THINKING|><|END_THINKING|>")


def test_tool_calls_are_numbered_and_their_results_merged(tokenizer: Tokenizer) -> None:
    def call(name: str, arguments: object) -> dict[str, object]:
        return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}

    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [call("f", {"x": 1}), call("g", '{"y": 2}')]},
        {"role": "tool", "tool_call_id": "call-g", "content": "G"},
        {"role": "tool", "tool_call_id": "call-f", "content": [{"type": "text", "text": "F"}]},
        {"role": "assistant", "content": "so", "tool_calls": [call("h", {})]},
    ]
    text = tokenizer.render(messages, add_generation_prompt=False)
    actions = [part.split("<|END_ACTION|>")[0] for part in text.split("<|START_ACTION|>")[1:]]
    calls = [json.loads(action) for action in actions]
    assert [c["tool_call_id"] for turn in calls for c in turn] == ["0", "1", "2"]
    assert calls[0][1] == {"tool_call_id": "1", "tool_name": "g", "parameters": {"y": 2}}
    (results,) = text.split("<|START_TOOL_RESULT|>")[1:]
    entries = json.loads(results.split("<|END_TOOL_RESULT|>")[0])
    assert [(e["tool_call_id"], e["results"]["0"]["content"]) for e in entries] == [("1", "G"), ("0", "F")]
    assert "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>" in text
    assert "<|END_THINKING|><|START_TEXT|>so<|END_TEXT|><|START_ACTION|>" in text


def test_template_errors_are_the_users(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(MkError, match="unknown message role: critic"):
        tokenizer.render([{"role": "critic", "content": "no"}])
    with pytest.raises(MkError, match="empty conversation"):
        tokenizer.render([])
    rewrite(folder, tmp_path, "config.json")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(MkError, match="has no chat template"):
        load_tokenizer(tmp_path).render([])
