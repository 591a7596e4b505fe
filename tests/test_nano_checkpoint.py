"""The nano checkpoint: what the folder holds, that transformers reads it, and that it has learnt Python."""

from __future__ import annotations

import ast
import gzip
import json
import math
import random
import re

import pytest
import torch
from safetensors import safe_open
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from experiments.nano_corpus import MARKERS, TOOLS
from experiments.nano_model import NanoModel
from mk.model.geometry import Geometry
from mk.model.opening import NANO

CONFIG = json.loads((NANO / "config.json").read_text())
RECORD = json.loads((NANO / "training.json").read_text())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(NANO)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def greedy(model, tokenizer):
    """Greedy continuation of a text, special tokens kept."""

    def continue_text(text: str, tokens: int) -> str:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=not text.startswith("<BOS_TOKEN>")).input_ids
        new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return tokenizer.decode(new[0, ids.shape[1] :])

    return continue_text


def test_folder_is_small():
    files = list(NANO.iterdir())
    assert sum(file.stat().st_size for file in files) <= 10_000_000
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in files
    }


def test_structure_is_the_full_models():
    g = Geometry.from_hf_config(CONFIG)
    assert CONFIG["model_type"] == "cohere2_moe" and CONFIG["tie_word_embeddings"]
    assert g.layers >= 5 and g.kv_heads >= 2 and g.q_heads > g.kv_heads and g.experts >= 24
    assert 128 <= g.window <= 256 and g.max_positions >= 65_536
    assert g.mlp_kinds[0] == "dense" and set(g.mlp_kinds[1:]) == {"sparse"}
    assert g.rope[0] and g.layer_kinds[0] == "full"
    assert any(kind == "full" and not rope for kind, rope in zip(g.layer_kinds, g.rope, strict=True))
    assert any(kind == "sliding" for kind in g.layer_kinds)
    assert g.expert_ffn % 8 == 0 and g.head_dim == 128


def test_weights_are_bf16_with_the_published_names():
    shapes, dtypes = {}, set()
    with safe_open(NANO / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            shapes[name] = tuple(file.get_slice(name).get_shape())
            dtypes.add(file.get_slice(name).get_dtype())
    assert dtypes == {"BF16"}
    expected = {name: tuple(view.shape) for name, view in NanoModel(CONFIG).hf_views().items()}
    assert shapes == expected
    assert "model.layers.1.mlp.experts.23.gate_proj.weight" in shapes and "lm_head.weight" not in shapes
    assert sum(math.prod(shape) for shape in shapes.values()) == RECORD["model"]["parameters"]


def test_tokenizer_round_trips_anything(tokenizer):
    rng = random.Random(0)
    ranges = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0x10FFFF)]
    for _ in range(200):
        text = "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(0, 60)))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= tokenizer.get_vocab().keys()  # any byte string, too


def test_tokenizer_is_the_vocabulary_of_the_config(tokenizer):
    assert len(tokenizer) == CONFIG["vocab_size"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(CONFIG["vocab_size"]))
    for marker in MARKERS:
        assert len(tokenizer(marker, add_special_tokens=False).input_ids) == 1, marker
    generation = GenerationConfig.from_pretrained(NANO)
    for ids in (CONFIG, generation.to_dict()):
        assert ids["bos_token_id"] == tokenizer.bos_token_id == tokenizer("x").input_ids[0]
        assert ids["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|END_OF_TURN_TOKEN|>")
        assert ids["pad_token_id"] == tokenizer.pad_token_id


def test_chat_template_layout(tokenizer):
    def call(id: str, name: str, arguments: dict[str, str] | str) -> dict:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Go"}]},
        {
            "role": "assistant",
            "thinking": "two calls",
            "tool_calls": [call("b", "read_file", {"path": "é<"}), call("a", "run_python", '{"code": "1"}')],
        },
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "assistant", "reasoning_content": "done", "content": "Yes."},
    ]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS[:1], tokenize=False, add_generation_prompt=True)
    tool = json.loads(text.partition("```json\n")[2].partition("\n```")[0])[0]
    assert tool == {**TOOLS[0]["function"], "responses": None}
    _, _, conversation = text.partition("```<|END_OF_TURN_TOKEN|>")
    turn, end = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
    assert text.startswith(f"<BOS_TOKEN>{turn}<|SYSTEM_TOKEN|>")
    assert conversation == (
        f"{turn}<|SYSTEM_TOKEN|>Be brief.{end}{turn}<|USER_TOKEN|><|START_TEXT|>Go<|END_TEXT|>{end}"
        f"{turn}<|CHATBOT_TOKEN|><|START_THINKING|>two calls<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "read_file", "parameters": {"path": "é<"}},\n'
        '{"tool_call_id": "1", "tool_name": "run_python", "parameters": {"code": "1"}}\n'
        f"]<|END_ACTION|>{end}{turn}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\n"
        '{"tool_call_id": "1", "results": {"0": {"content": "one"}}, "is_error": null},\n'
        '{"tool_call_id": "0", "results": {"0": {"content": "two"}}, "is_error": null}\n'
        f"]<|END_TOOL_RESULT|>{end}"
        f"{turn}<|CHATBOT_TOKEN|><|START_THINKING|>done<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>{end}"
        f"{turn}<|CHATBOT_TOKEN|><|START_THINKING|>"
    )
    for off in ({"reasoning": False}, {"reasoning_effort": "none"}):
        silent = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True, **off)
        assert silent.endswith("<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>")


def test_training_form_equals_transformers(model):
    own = NanoModel(CONFIG).eval()
    with safe_open(NANO / "model.safetensors", "pt") as file:
        for name, view in own.hf_views().items():
            view.copy_(file.get_tensor(name))
    tokens = torch.randint(CONFIG["vocab_size"], (2, 3 * CONFIG["sliding_window"]), generator=torch.manual_seed(0))
    with torch.no_grad():
        expected, (logits, _) = model(tokens).logits, own(tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


def test_held_out_bits_per_byte_are_the_cards(model, tokenizer):
    text = (NANO / "held_out_sample.txt").read_text()
    ids = tokenizer(text + "<|END_OF_TURN_TOKEN|>", return_tensors="pt").input_ids
    assert CONFIG["sliding_window"] < ids.shape[1] <= 4096
    with torch.no_grad():
        log_probability = model(ids).logits[0, :-1].log_softmax(-1)
    bits = -log_probability.gather(1, ids[0, 1:, None]).sum().item() / math.log(2) / len(text.encode())
    stated = RECORD["sample_bits_per_byte"]
    assert bits == pytest.approx(stated["nano"], rel=0.005)
    assert bits < 0.5 * 8 * len(gzip.compress(text.encode(), 9)) / len(text.encode())
    card = (NANO / "README.md").read_text()
    assert f"{stated['nano']:.3f} bits per byte" in card
    for row in RECORD["bits_per_byte"].values():
        assert row["nano"] < row["xz"] < row["gzip"] < row["trigram"]
        assert all(f"{row[key]:.3f}" in card for key in ("nano", "xz", "gzip", "trigram"))


def test_card_names_data_licence_and_run():
    card = (NANO / "README.md").read_text()
    run = RECORD["run"]
    for fact in ("Python Software Foundation License Version 2", RECORD["data"]["sha256"], f"Seed {run['seed']};"):
        assert fact in card
    assert f"{run['steps']:,} steps" in card and run["hardware"] in card


@pytest.mark.parametrize(
    ("prompt", "pattern"),
    [
        ('class Stack:\n    """A last-in first-out list."""\n\n    def __init__(self):', r"\n        self\.\w+ = "),
        ("import os\nimport sys\n\n\ndef read_lines(path):", r"\n    return .*\bpath\b"),
        ("class TestStack(unittest.TestCase):\n    def setUp(self):", r"\n        self\.\w+ = "),
        ("def parse_args(argv=None):\n    parser = argparse.ArgumentParser(", r"\n    parser\.add_argument\('-"),
    ],
)
def test_it_writes_python(greedy, prompt, pattern):
    assert re.search(pattern, greedy(prompt, 48)), greedy(prompt, 48)


@pytest.mark.parametrize(
    ("prompt", "lines"),
    [
        ("def main():\n    import sys\n    args = sys.argv[1:]\n    if not args:", 10),
        ('def copy_file(source, target):\n    """Copy a file."""\n    with open(source', 7),
        ('class Stack:\n    """A last-in first-out list."""\n\n    def __init__(self):', 9),
    ],
)
def test_what_it_writes_parses(greedy, prompt, lines):
    written = (prompt + greedy(prompt, 64)).splitlines()[:-1]  # the token limit cuts off the last line
    if written[-1].endswith(":"):  # and so a block may have lost its body
        written.pop()
    assert len(written) >= lines
    assert all(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.parse("\n".join(written)).body)


def test_it_speaks_the_marker_grammar(greedy, tokenizer):
    ask = [{"role": "user", "content": "What is 17 + 25?"}]
    reply = greedy(tokenizer.apply_chat_template(ask, tools=TOOLS, tokenize=False, add_generation_prompt=True), 96)
    match = re.fullmatch(
        r"[^<]+<\|END_THINKING\|><\|START_ACTION\|>(.+)<\|END_ACTION\|><\|END_OF_TURN_TOKEN\|>", reply, re.DOTALL
    )
    assert match, reply
    (action,) = json.loads(match[1])
    assert action == {"tool_call_id": "0", "tool_name": "run_python", "parameters": {"code": "print(17 + 25)"}}

    ask = [{"role": "user", "content": "Write `clamp(value, low, high)`. Limit value to a range."}]
    reply = greedy(tokenizer.apply_chat_template(ask, tokenize=False, add_generation_prompt=True), 48)
    assert re.match(r"[^<]+<\|END_THINKING\|><\|START_TEXT\|>```python\ndef clamp\(value, low, high\):\n", reply), reply
