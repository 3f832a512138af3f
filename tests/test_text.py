"""Tokenizers and chat templates, compared with transformers on the same files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_dream, make_llada
from synthetic_text import (
    DREAM_TEMPLATE,
    LLADA_TEMPLATE,
    byte_characters,
    write_dream_tokenizer,
)
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from lacache_trt.chat_template import MAX_OUTPUT_CHARACTERS, ChatTemplate
from lacache_trt.errors import ArtifactError, CheckpointError, InvalidRequestError
from lacache_trt.export.tokenizer import write_tokenizer
from lacache_trt.text import TextCodec

MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "i n", "in g", "Ġ Ġ")
LLADA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
DREAM_HEADER = "<|im_start|>assistant\n"
CHAT = [
    {"role": "user", "content": " What is 12 + 30? "},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And twice that?"},
]


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llada(tmp_path_factory.mktemp("llada"), vocab=320, layers=1, tokenizer=True)


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_dream(tmp_path_factory.mktemp("dream"), vocab=320, layers=1)
    write_dream_tokenizer(root, 320, MERGES)
    return root


def bundle_of(root: Path, out: Path) -> TextCodec:
    out.mkdir(parents=True, exist_ok=True)
    assert write_tokenizer(root, out) is not None
    codec = TextCodec.load(out)
    assert codec is not None
    return codec


@pytest.fixture(scope="module")
def llada_codec(llada: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return bundle_of(llada, tmp_path_factory.mktemp("llada_bundle"))


@pytest.fixture(scope="module")
def dream_codec(dream: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return bundle_of(dream, tmp_path_factory.mktemp("dream_bundle"))


@pytest.fixture(scope="module")
def dream_reference(dream: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' Qwen2 tokenizer loaded from the same files."""
    root = copy_with_config(
        dream, tmp_path_factory.mktemp("reference"), tokenizer_class="Qwen2Tokenizer", auto_map=None
    )
    return Qwen2Tokenizer.from_pretrained(root)


TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="helo world,.'sSdDmM123\n\r\t  éÅ", max_size=60),
    st.lists(st.sampled_from(["<|im_end|>", "<|mask|>", "hello", " world", "\n\n "])).map("".join),
)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_dream_tokenizer_is_qwen2s(dream_codec: TextCodec, dream_reference: Any, text: str) -> None:
    ids = dream_codec.encode(text)
    assert ids == dream_reference(text, add_special_tokens=False)["input_ids"]
    assert dream_codec.decode(ids, skip_special=False) == dream_reference.decode(
        ids, clean_up_tokenization_spaces=False
    )


def test_dream_ids(dream_codec: TextCodec) -> None:
    assert dream_codec.encode("<|im_start|><|im_end|><|endoftext|><|mask|>") == [316, 317, 318, 319]
    assert dream_codec.special_ids == (316, 317, 318, 319)
    assert dream_codec.decode([316, 319]) == ""
    assert dream_codec.special_tokens["mask_token"] == "<|mask|>"
    assert len(dream_codec.encode("hello world")) == 3


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_llada_tokenizer_round_trip(llada_codec: TextCodec, text: str) -> None:
    assert llada_codec.decode(llada_codec.encode(text), skip_special=False) == text


def test_llada_tokenizer_file_is_copied(llada: Path, tmp_path: Path) -> None:
    files = write_tokenizer(llada, tmp_path)
    assert files is not None
    assert files.tokenizer.read_bytes() == (llada / "tokenizer.json").read_bytes()
    text = json.loads(files.text.read_text())
    assert text["chat_template"] == LLADA_TEMPLATE
    assert text["special_tokens"] == {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    assert text["special_ids"] == list(range(314, 320))


def test_decode_skips_special_and_unknown_ids(llada_codec: TextCodec) -> None:
    ids = [314, *llada_codec.encode("yes"), 317, 318, 319, 100_000]
    assert llada_codec.decode(ids) == "yes"
    assert llada_codec.decode(ids, skip_special=False).startswith("<|startoftext|>yes<|eot_id|>")


@pytest.mark.parametrize("ids", [[-1], [1.5], ["1"], [None], [2**31]])
def test_decode_refuses_what_is_no_id(llada_codec: TextCodec, ids: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="invalid token id"):
        llada_codec.decode(ids)


@pytest.mark.parametrize("text", [b"bytes", None, 3, "\ud800"])
def test_encode_refuses_what_is_no_text(llada_codec: TextCodec, text: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llada_codec.encode(text)


@pytest.mark.parametrize("messages", [CHAT, CHAT[:1], [{"role": "system", "content": "x"}, *CHAT]])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_stock_templates_render_as_in_transformers(
    family: str,
    messages: list[dict[str, str]],
    llada_codec: TextCodec,
    dream_codec: TextCodec,
) -> None:
    codec = llada_codec if family == "llada" else dream_codec
    reference = PreTrainedTokenizerFast(
        tokenizer_object=codec.tokenizer, bos_token="<|startoftext|>", eos_token="<|endoftext|>"
    )
    reference.chat_template = codec.template
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert codec.apply_chat_template(messages) == expected


def test_a_string_is_a_user_message(llada_codec: TextCodec) -> None:
    assert llada_codec.apply_chat_template("Hi") == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>" + LLADA_HEADER
    )


_TURNS = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
)


@pytest.mark.parametrize(
    "ending",
    [
        "",
        LLADA_HEADER,
        "{% if add_generation_prompt %}" + LLADA_HEADER + "{% endif %}",
        LLADA_HEADER + "{% if add_generation_prompt %}" + LLADA_HEADER + "{% endif %}",
        LLADA_HEADER.rstrip(),
        LLADA_HEADER + "\n",
    ],
)
def test_exactly_one_assistant_header_whatever_the_template_does(ending: str) -> None:
    text = ChatTemplate(_TURNS + ending).render([{"role": "user", "content": "q"}], {})
    assert text.endswith("q<|eot_id|>" + LLADA_HEADER)
    assert text.count("<|start_header_id|>assistant") == 1


def test_an_assistants_turn_before_is_kept() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    text = ChatTemplate(_TURNS).render(messages, {})
    assert text.count("<|start_header_id|>assistant") == 2
    text = ChatTemplate(DREAM_TEMPLATE).render(messages, {})
    assert text.endswith("<|im_start|>assistant\n<|im_end|>\n" + DREAM_HEADER)


def test_unknown_formats_are_left_alone() -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    rendered = ChatTemplate(template).render([{"role": "user", "content": "q"}], {"bos_token": "^"})
    assert rendered == "^[q]"


def test_what_transformers_offers_to_templates() -> None:
    template = (
        "{%- for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %} {{ strftime_now('%Y') }}"
    )
    text = ChatTemplate(template).render([{"role": "user", "content": "é<"}] * 2, {})
    assert re.fullmatch(r'\{"role": "user", "content": "é<"\} \d{4}', text)


def test_a_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render([{"role": "user", "content": "q"}], {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**8 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'y' * 1000 }}{% endfor %}",
        "{% set ns = namespace(s='x' * 1000) %}{% for i in range(40) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "{{ '%999999999d' % 1 }}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages['x']['y'] }}",
        "{{ messages[7].role.x }}",
    ],
)
def test_hostile_and_broken_templates(source: str) -> None:
    with pytest.raises(ArtifactError, match="chat template fails"):
        ChatTemplate(source).render([{"role": "user", "content": "q"}], {})


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{", "{% include 'x' %}{% endfor %}", "x" * (MAX_OUTPUT_CHARACTERS + 1)]
)
def test_what_is_no_template(source: str) -> None:
    with pytest.raises(ArtifactError):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "messages",
    [[], {}, None, 3, [1], ["x"], [{"role": "user"}], [{"role": "user", "content": 3}], [{}]],
)
def test_malformed_messages(llada_codec: TextCodec, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="invalid chat messages"):
        llada_codec.apply_chat_template(messages)


def test_no_tokenizer_files(tmp_path: Path) -> None:
    root = make_llada(tmp_path / "a", layers=1)
    (tmp_path / "out").mkdir()
    assert write_tokenizer(root, tmp_path / "out") is None
    assert list((tmp_path / "out").iterdir()) == []
    assert TextCodec.load(tmp_path / "out") is None


def test_no_template(dream: Path, tmp_path: Path) -> None:
    root = copy_with_config(dream, tmp_path, chat_template=None)
    codec = bundle_of(root, tmp_path / "out")
    assert not codec.has_chat_template
    with pytest.raises(ArtifactError, match="no chat template"):
        codec.apply_chat_template("Hi")


def copy_with_config(source: Path, tmp_path: Path, **changes: Any) -> Path:
    root = shutil.copytree(source, tmp_path / "copy")
    path = root / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return root


def test_named_templates_and_template_file(llada: Path, tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    root = copy_with_config(llada, tmp_path, chat_template=named)
    assert bundle_of(root, tmp_path / "a").template == "D"
    (root / "chat_template.jinja").write_text("J")
    assert bundle_of(root, tmp_path / "b").template == "J"
    copy_with_config(llada, tmp_path / "other", chat_template=7)
    with pytest.raises(CheckpointError, match="chat_template"):
        write_tokenizer(tmp_path / "other" / "copy", tmp_path)


def test_ids_beyond_the_vocabulary(llada: Path, tmp_path: Path) -> None:
    root = shutil.copytree(llada, tmp_path / "copy")
    config = json.loads((root / "config.json").read_text())
    config.update(vocab_size=318, embedding_size=318, mask_token_id=315, eos_token_id=316)
    (root / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"<\|endoftext\|>'=318.*<\|mdm_mask\|>'=319"):
        write_tokenizer(root, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("vocab.json", b"[]", "JSON object"),
        ("vocab.json", b'{"a": "x"}', r"vocab\.json is invalid"),
        ("vocab.json", b'{"a": 0}', "fit together|cannot have the id"),
        ("merges.txt", b"a b c\n", "rule 1"),
        ("merges.txt", b"\xff\n", "not UTF-8"),
        ("merges.txt", b"zz qq\n", "fit together"),
        ("tokenizer_config.json", b'{"tokenizer_class": "SomethingTokenizer"}', "own code"),
        ("tokenizer.json", b"{}", "not a tokenizer"),
        ("tokenizer.json", b"nonsense", "not a tokenizer|not valid JSON"),
    ],
)
def test_broken_tokenizer_files(
    dream: Path, tmp_path: Path, name: str, content: bytes, match: str
) -> None:
    root = shutil.copytree(dream, tmp_path / "copy")
    (root / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        write_tokenizer(root, tmp_path)
    assert not (tmp_path / "text.json").exists()


def test_added_tokens_json_is_the_older_form(dream: Path, tmp_path: Path) -> None:
    root = copy_with_config(dream, tmp_path, added_tokens_decoder=None)
    (root / "added_tokens.json").write_text('{"<|im_start|>": 316, "<|im_end|>": 317}')
    codec = bundle_of(root, tmp_path / "out")
    assert codec.encode("<|im_end|>") == [317]
    assert codec.special_ids == (316, 317)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text.json", b"{}"),
        ("text.json", b"["),
        ("text.json", b'{"version": 2}'),
        ("text.json", b'{"version": 1, "special_tokens": {}, "special_ids": ["x"]}'),
        ("text.json", None),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", None),
    ],
)
def test_broken_bundle_files(llada: Path, tmp_path: Path, name: str, content: bytes | None) -> None:
    write_tokenizer(llada, tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArtifactError):
        TextCodec.load(tmp_path)


def test_saved_truncation_and_padding_do_not_cut_prompts(llada: Path, tmp_path: Path) -> None:
    write_tokenizer(llada, tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["truncation"] = {
        "max_length": 3,
        "strategy": "LongestFirst",
        "direction": "Right",
        "stride": 0,
    }
    path.write_text(json.dumps(tokenizer))
    codec = TextCodec.load(tmp_path)
    assert codec is not None
    assert len(codec.encode("abcdefgh")) == 8


def test_the_byte_alphabet_is_the_libraries() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_characters()) == sorted(ByteLevel.alphabet())


def test_loading_needs_neither_torch_nor_transformers(llada: Path, tmp_path: Path) -> None:
    write_tokenizer(llada, tmp_path)
    script = (
        "import sys, json\n"
        "from lacache_trt.text import TextCodec\n"
        "light = [m for m in ('tokenizers', 'jinja2') if m in sys.modules]\n"
        f"TextCodec.load({str(tmp_path)!r}).apply_chat_template('Hi')\n"
        "heavy = [m for m in ('torch', 'onnx', 'transformers') if m in sys.modules]\n"
        "print(json.dumps(light + heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x'.rjust(10**9) }}",
        "{{ 'x'.zfill(10**9) }}",
        "{{ 'x'|center(10**9) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ ('a\\n' * 1000000)|indent(10000) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
        "{{ (['a'] * 100000)|join('b' * 100000) }}",
        "{{ ('b' * 100000).join(['a'] * 100000) }}",
        "{{ [1]|slice(10**9)|list }}",
        "{% set n = namespace(x=10) %}{% for i in range(60) %}"
        "{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ lipsum(n=10**5) }}",
    ],
)
def test_templates_cannot_build_large_values(source: str) -> None:
    with pytest.raises(ArtifactError, match="chat template fails"):
        ChatTemplate(source).render(CHAT, {})


def test_padding_and_joining_within_reason_works() -> None:
    source = (
        "{{ messages|map(attribute='role')|join(', ') }}{{ 'a\\nb'|indent(2) }}"
        "{{ 'ab'.replace('b', 'c') }}{{ '%3d'|format(7) }}{{ 'x'|center(3) }}"
    )
    assert ChatTemplate(source).render(CHAT, {}) == "user, assistant, usera\n  bac  7 x "
