"""Data of the nano checkpoint: a CPython standard library as text, its split, its tokenizer, and synthetic chats.

A document is a source file, or one topic of the language reference that `pydoc_data/topics.py` carries. The held-out
split is by document path, so no file is on both sides.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mk.errors import MkError

PAD, UNK, BOS, END_OF_TURN = "<PAD>", "<UNK>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"
_ROLES = ("SYSTEM_TOKEN", "USER_TOKEN", "CHATBOT_TOKEN")
_SPANS = tuple(f"{edge}_{span}" for span in ("THINKING", "TEXT", "ACTION", "TOOL_RESULT") for edge in ("START", "END"))
MARKERS = (PAD, UNK, BOS, "<|START_OF_TURN_TOKEN|>", END_OF_TURN, *(f"<|{name}|>" for name in (*_ROLES, *_SPANS)))

HELD_OUT_PER_MILLE = 30
TOPICS = "pydoc_data/topics.py"
# Build products, other people's packages, and tables of code points (data rather than source).
_CODE_PAGES = ("cp", "iso", "mac_", "koi8", "kz1048", "hp_roman8", "ptcp154", "palmos", "tis_620")
EXCLUDED = ("config-*/*", "_sysconfigdata*", *(f"encodings/{name}*" for name in _CODE_PAGES))


@dataclass(frozen=True, slots=True)
class Document:
    path: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE

    @property
    def is_test(self) -> bool:
        return "test" in self.path

    @property
    def size(self) -> int:
        """UTF-8 bytes."""
        return len(self.text.encode())


def read_corpus(folder: str | Path | None) -> list[Document]:
    """Documents of a `Lib` folder (None: this interpreter's) in path order; exact duplicates and non-UTF-8 left out.

    Raises MkError where the folder has no Python source.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    documents: list[Document] = []
    seen: set[str] = set()
    for file in sorted(root.rglob("*.py"), key=lambda f: f.relative_to(root).as_posix()):
        path = file.relative_to(root).as_posix()
        if "-packages/" in path or any(PurePosixPath(path).match(pattern) for pattern in EXCLUDED):
            continue
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        documents += _topics(text) if path == TOPICS else [Document(path, text)]
    if not documents:
        raise MkError(f"corpus_dir: no Python source under {root}", hint="give the Lib folder of a CPython source tree")
    return documents


def _topics(source: str) -> list[Document]:
    """The language reference: `topics = {name: text, …}` as one document a topic."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            return [Document(f"{TOPICS}#{name}", text) for name, text in ast.literal_eval(node.value).items()]
    return []


def corpus_sha256(documents: Iterable[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.path}\0{hashlib.sha256(document.text.encode()).hexdigest()}\n".encode())
    return digest.hexdigest()


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab` entries, markers first; MkError where the text does not give so many."""
    tokenizer = Tokenizer(models.BPE())
    # Words take one space before them, digits stand alone, and an indent keeps its newline: short for code.
    pieces = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(MARKERS),
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    if tokenizer.get_vocab_size() != vocab:
        raise MkError(f"corpus_dir: too little text for {vocab} tokens, only {tokenizer.get_vocab_size()} came of it")
    return tokenizer


# ---- synthetic chats: they teach the marker grammar, with real functions, files and topics as their content ----


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("read_file", "Read the first lines of a file.", "path"),
    _tool("run_python", "Run Python code and return what it prints.", "code"),
    _tool("list_dir", "List the files of a folder.", "path"),
]

Messages = list[dict[str, Any]]


def _functions(document: Document) -> list[tuple[str, str, str]]:
    """(signature, first docstring line, dedented source) of the short documented functions of a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            return []
    lines = document.text.splitlines(keepends=True)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
            continue
        source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
        if 3 <= source.count("\n") <= 30 and len(source) <= 1200 and source.startswith("def "):
            found.append((f"{node.name}({ast.unparse(node.args)})", docstring.splitlines()[0].strip(), source))
    return found


def _code_chat(rng: random.Random, function: tuple[str, str, str]) -> Messages:
    signature, summary, source = function
    ask = rng.choice(["Write `{0}`. {1}", "Write a Python function `{0}`: {1}", "Please implement `{0}`. {1}"])
    think = rng.choice(["I write the function `{0}`.", "The user wants `{0}`.", "A function, then. {1}"])
    return [
        {"role": "user", "content": ask.format(signature, summary)},
        {"role": "assistant", "thinking": think.format(signature, summary), "content": f"```python\n{source}\n```"},
    ]


def _tool_chat(ask: str, think: str, name: str, argument: str, value: str, result: str, answer: str) -> Messages:
    call = {"id": "call", "type": "function", "function": {"name": name, "arguments": {argument: value}}}
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "thinking": think, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": result},
        {"role": "assistant", "thinking": "I have the result.", "content": answer},
    ]


def _read_chat(rng: random.Random, document: Document) -> Messages:
    head = "\n".join(document.text.splitlines()[: rng.randint(4, 10)])
    ask = rng.choice(["Read {0}.", "Show me the file {0}.", "What is in {0}?", "How does {0} begin?"])
    return _tool_chat(
        ask.format(document.path),
        f"I read {document.path} first.",
        "read_file",
        "path",
        document.path,
        head,
        f"`{document.path}` begins with:\n```python\n{head}\n```",
    )


def _run_chat(rng: random.Random) -> Messages:
    left, right, operator = rng.randint(2, 999), rng.randint(2, 999), rng.choice("+-*")
    expression = f"{left} {operator} {right}"
    result = str({"+": left + right, "-": left - right, "*": left * right}[operator])
    return _tool_chat(
        f"What is {expression}?",
        "I compute it with Python.",
        "run_python",
        "code",
        f"print({expression})",
        result,
        f"{expression} is {result}.",
    )


def _list_chat(folder: str, names: Sequence[str]) -> Messages:
    listing = "\n".join(names[:12])
    return _tool_chat(
        f"List the folder {folder}.",
        f"I list {folder}.",
        "list_dir",
        "path",
        folder,
        listing,
        f"`{folder}` holds {', '.join(names[:12])}.",
    )


class ChatMaterial:
    """What conversations are made of: functions, files, folders and topics of the training documents."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.sources = [d for d in documents if d.path.endswith(".py")]
        self.topics = [d for d in documents if "#" in d.path]
        self.functions = [f for d in self.sources for f in _functions(d)]
        self.folders: dict[str, list[str]] = {}
        for document in self.sources:
            path = PurePosixPath(document.path)
            self.folders.setdefault(str(path.parent), []).append(path.name)

    def conversations(self, count: int, seed: int) -> list[tuple[Messages, bool]]:
        """`count` seeded conversations: (messages, whether tools are listed)."""
        rng = random.Random(seed)
        return [self._conversation(rng) for _ in range(count)]

    def _conversation(self, rng: random.Random) -> tuple[Messages, bool]:
        kind = rng.random()
        if kind < 0.60 and self.functions:
            return _code_chat(rng, rng.choice(self.functions)), rng.random() < 0.3
        if kind < 0.70 and self.topics:
            topic = rng.choice(self.topics)
            paragraph = next((p for p in topic.text.split("\n\n") if len(p) > 120), topic.text)[:1200]
            ask = {"role": "user", "content": f"Explain `{topic.path.partition('#')[2]}`."}
            return [
                ask,
                {"role": "assistant", "thinking": "The language reference has this.", "content": paragraph},
            ], False
        if kind < 0.85:
            return _read_chat(rng, rng.choice(self.sources)), True
        if kind < 0.95:
            return _run_chat(rng), True
        folder = rng.choice(sorted(self.folders))
        return _list_chat(folder, self.folders[folder]), True


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """BOS text END_OF_TURN of each text, int16."""
    first, last = tokenizer.token_to_id(BOS), tokenizer.token_to_id(END_OF_TURN)
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.array([first, *encoding.ids, last], dtype=np.int16) for encoding in encoded]


def encode_chats(
    tokenizer: Tokenizer, template: str, training: Sequence[Document], tokens: int, seed: int
) -> list[np.ndarray]:
    """Chats from the training documents, rendered by the chat template; 2,000 at a time until they have `tokens`."""
    renderer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=END_OF_TURN)
    renderer.chat_template = template
    material = ChatMaterial(training)
    chats: list[np.ndarray] = []
    batch = 0
    while sum(map(len, chats)) < tokens:
        texts = [
            renderer.apply_chat_template(messages, tools=list(TOOLS) if tools else None, tokenize=False)
            for messages, tools in material.conversations(2000, seed * 1000 + batch)
        ]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        chats += [np.array(encoding.ids, dtype=np.int16) for encoding in encoded]
        batch += 1
    return chats
