"""How the nano checkpoint is made: its split, its batches, its baselines, and that its loop trains."""

from __future__ import annotations

import itertools
import math
import types

import numpy as np
import pytest
import torch

from experiments import train_nano
from experiments.nano_corpus import ChatMaterial, Document, corpus_sha256, encode, read_corpus, train_tokenizer
from experiments.nano_model import ROW, NanoModel, windowed_attention
from experiments.nano_report import baseline_bits, seen_line_share, trigram_bits
from experiments.nano_training import Schedule, bits, packed_rows, train
from mk.errors import MkError

SMALL = {
    **train_nano.hf_config(),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 8,
    "prefix_dense_intermediate_size": 32,
    "vocab_size": 64,
}


@pytest.fixture
def lib(tmp_path):
    """A small `Lib`: sources, a duplicate, a code page, an installed package, a latin-1 file, language topics."""
    source = 'def add{0}(left, right):\n    """Add {0}."""\n    total = left + right + {0}\n    return total\n'
    files = {f"package/module{i}.py": source.format(i) for i in range(60)}
    files |= {"copy.py": source.format(1), "encodings/cp037.py": "table = 1\n", "encodings/utf_8.py": "import codecs\n"}
    files |= {"site-packages/x.py": "installed = 1\n", "empty.py": "\n"}
    files |= {"pydoc_data/topics.py": "topics = {'assert': 'The statement.', 'break': 'Leaves a loop.'}\n"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    return tmp_path


def test_corpus_leaves_out_what_is_not_source(lib):
    documents = read_corpus(lib)
    paths = [d.path for d in documents]
    assert len(paths) == len(set(paths)) == 60 + 1 + 2  # module1.py is the duplicate: copy.py comes first
    assert {"copy.py", "encodings/utf_8.py", "pydoc_data/topics.py#assert", "pydoc_data/topics.py#break"} <= set(paths)
    assert corpus_sha256(documents) == corpus_sha256(read_corpus(lib)) != corpus_sha256(documents[1:])


def test_corpus_without_source_is_an_error(tmp_path):
    with pytest.raises(MkError, match="corpus_dir: no Python source"):
        read_corpus(tmp_path)
    with pytest.raises(MkError, match="corpus_dir: too little text"):
        train_tokenizer(["a b"], 1408)


def test_split_is_by_path_and_near_its_share():
    documents = [Document(f"module{i}.py", "") for i in range(5000)]
    share = sum(d.held_out for d in documents) / len(documents)
    assert 0.02 < share < 0.04
    assert all(Document(d.path, "other text").held_out == d.held_out for d in documents[:100])


def test_chats_are_seeded(lib):
    material = ChatMaterial(read_corpus(lib))
    assert len(material.functions) == 60
    chats = material.conversations(50, seed=1)
    assert chats == material.conversations(50, seed=1) != material.conversations(50, seed=2)
    assert {message["role"] for messages, _ in chats for message in messages} == {"user", "assistant", "tool"}


def test_packed_rows_hold_each_document_once_an_epoch():
    rng = np.random.default_rng(0)
    files = [rng.integers(0, 60, rng.integers(500, 3000)).astype(np.int16) for _ in range(40)]
    chats = [np.full(100, 60 + i % 2, dtype=np.int16) for i in range(40)]  # slice 0 is all 60s, slice 1 all 61s
    epoch = sum(map(len, files)) + 20 * 100
    batches = list(itertools.islice(packed_rows(files, chats, 2, seed=3, rows=2), 2 * epoch // (2 * ROW)))
    assert all(batch.shape == (2, ROW + 1) for batch in batches)
    rows = np.concatenate(batches)
    assert (rows[:-1, -1] == rows[1:, 0]).all()  # the last target of a row is the first token of the next
    stream = rows[:, :-1].ravel()
    counts = [np.bincount(part, minlength=62) for part in (stream[:epoch], stream[epoch:])]
    assert (counts[0][:60] == sum(np.bincount(f, minlength=60) for f in files)).all()
    assert counts[0][60:].tolist() == [2000, 0] and counts[1][60] == 0 and counts[1][61] > 1000


def test_windowed_attention_is_masked_attention():
    generator = torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 48, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    position = torch.arange(48)
    distance = position[:, None] - position[None]
    scores = (q @ k.mT / math.sqrt(8)).masked_fill((distance < 0) | (distance >= 16), -math.inf)
    torch.testing.assert_close(windowed_attention(q, k, v, 16), scores.softmax(-1) @ v)


def test_bits_do_not_depend_on_windows_or_padding():
    torch.manual_seed(0)
    model = NanoModel(SMALL)
    short, long = (torch.randint(64, (n,)).numpy().astype(np.int16) for n in (700, ROW + 1))
    together = bits(model, [short, long], rows=2)
    assert together == pytest.approx(bits(model, [short]) + bits(model, [long]), rel=1e-6)
    logits = model(torch.from_numpy(long[None, :-1].astype(np.int64)))[0].log_softmax(-1)
    direct = -logits[0].gather(1, torch.from_numpy(long[1:, None].astype(np.int64))).sum().item() / math.log(2)
    assert bits(model, [long]) == pytest.approx(direct, rel=1e-6)
    longer = np.concatenate([long, long])  # three windows: every target counts once
    assert bits(model, [longer]) == pytest.approx((len(longer) - 1) * math.log2(64), rel=0.05)


def test_training_learns_and_repeats():
    rows = np.tile(np.arange(60, dtype=np.int16), 1 + ROW // 60)[None, : ROW + 1]
    schedule = Schedule(steps=8, warmup=3, lr=0.02, batch_tokens=ROW, weight_decay=0.1, balance=0.01, max_seconds=None)

    def run() -> tuple[float, list[str]]:
        torch.manual_seed(0)
        model, lines = NanoModel(SMALL), []
        before = bits(model, list(rows))
        progress = train(model, itertools.repeat(rows), schedule, lines.append, lambda: "")
        assert (progress.steps, progress.tokens, progress.out_of_time) == (8, 8 * ROW, False)
        after = bits(model, list(rows))
        assert after < 0.9 * before
        return after, lines

    (first, lines), (second, _) = run(), run()
    assert first == second
    assert any("8 steps" in line for line in lines)


def test_fewer_steps_than_warm_up():
    rows = np.zeros((1, ROW + 1), dtype=np.int16)
    schedule = Schedule(2, 10, 0.01, ROW, 0.0, 0.0, max_seconds=None)
    assert train(NanoModel(SMALL), itertools.repeat(rows), schedule, lambda line: None, lambda: "").steps == 2


def test_the_clock_fixes_the_steps():
    rows = np.zeros((1, ROW + 1), dtype=np.int16)
    schedule = Schedule(10_000, 10, 0.01, ROW, 0.0, 0.0, max_seconds=4.0)
    progress = train(NanoModel(SMALL), itertools.repeat(rows), schedule, lambda line: None, lambda: "")
    assert 10 <= progress.steps < 10_000 and progress.seconds < 120


def test_trigram_is_witten_bell():
    training, text = b"abab", b"abz"
    unigram = {c: (n + 2 * (1 / 256)) / (4 + 2) for c, n in ((b"a", 2), (b"b", 2), (b"z", 0))}
    # after a: b twice (1 type); after b: a once. Before the text stands a zero byte, as before the training.
    first = (1 + 1 * ((1 + 1 * unigram[b"a"]) / (1 + 1))) / (1 + 1)
    second = (1 + 1 * ((2 + 1 * unigram[b"b"]) / (2 + 1))) / (1 + 1)
    third = (0 + 1 * ((0 + 1 * unigram[b"z"]) / (1 + 1))) / (1 + 1)
    assert trigram_bits(training, text) == pytest.approx(-sum(map(math.log2, (first, second, third))))


def test_baselines_and_seen_lines():
    text = b"".join(b"value_%d = compute(%d)\n" % (i, i * i) for i in range(500))
    sizes = baseline_bits(text, text)
    assert 0 < sizes["xz"] < sizes["gzip"] < 8 * len(text) and sizes["trigram"] < 8 * len(text)
    lines = ["a line of more than thirty characters", "another line of more than thirty characters", "short"]
    assert seen_line_share([lines[0]], ["\n    ".join(lines)]) == 0.5


def test_main_refuses_bad_options(tmp_path):
    def config(**fields: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(experiment=types.SimpleNamespace(**fields))

    with pytest.raises(MkError, match="batch_tokens=1000 is not a multiple of 4096"):
        train_nano.main(config(out_dir=str(tmp_path), batch_tokens=1000))
    with pytest.raises(MkError, match="warmup=0 must be at least 1"):
        train_nano.main(config(out_dir=str(tmp_path), batch_tokens=ROW, steps=5, warmup=0))
    (tmp_path / "file").touch()
    with pytest.raises(MkError, match="is not empty"):
        train_nano.main(config(out_dir=str(tmp_path), batch_tokens=ROW, steps=5, warmup=5))


def test_encode_frames_each_text(lib):
    tokenizer = train_tokenizer((d.text for d in read_corpus(lib)), 300)
    (ids,) = encode(tokenizer, ["def add(left, right):"])
    assert ids.dtype == np.int16 and (ids[0], ids[-1]) == (2, 4)
    assert tokenizer.decode(ids[1:-1].tolist()) == "def add(left, right):"
