"""Tokenizers, streams of text and chat templates."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from parallax import chat
from parallax.tokenizer import ByteTokenizer, FileTokenizer, TextStream

MESSAGES = [{"role": "user", "content": "hi"}]


def bytes_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges, so that every character beyond ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return backend


def file_tokenizer(**options) -> FileTokenizer:
    return FileTokenizer(bytes_backend(), bos="<s>", eos=("</s>",), **options)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), file_tokenizer()], ids=["bytes", "file"])
@pytest.mark.parametrize("text", ["", "plain", " two  spaces ", "naïve €5 日本 😀\n"])
def test_decoding_gives_the_encoded_text_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id == 256
    assert ids[1:] == tokenizer.encode(text, special=False)
    assert tokenizer.decode([*ids, *tokenizer.eos_ids]) == text
    assert max(ids) < tokenizer.vocab_size == 258


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), file_tokenizer()], ids=["bytes", "file"])
def test_a_stream_never_returns_half_a_character(tokenizer):
    text = "a€😀é日本 end"
    stream = TextStream(tokenizer)
    pieces = [stream.push([i]) for i in tokenizer.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text
    assert pieces[1] == "a" and pieces[2:5] == ["", "", "€"]


def test_a_stream_gives_the_same_text_for_any_division_into_pushes():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("x€y😀") + [0xFF, 65, 0xE2, 0x82]
    for size in range(1, len(ids)):
        stream = TextStream(tokenizer)
        text = "".join(stream.push(ids[i:i + size]) for i in range(0, len(ids), size)) + stream.flush()
        assert text == tokenizer.decode(ids)


def test_a_stream_does_not_wait_for_ever_for_bytes_that_are_no_text():
    stream = TextStream(ByteTokenizer())
    assert stream.push([0xFF] * 100)
    assert stream.flush().strip("\ufffd") == ""


def test_special_tokens_in_the_text_are_recognised():
    assert file_tokenizer().encode("<s></s>", special=False) == [256, 257]


def test_lone_surrogates_do_not_raise():
    assert file_tokenizer().encode("\udcff") == file_tokenizer().encode("?")


def test_a_saved_tokenizer_loads_back(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}"
    file_tokenizer(chat_template=template, others={"pad_token": "</s>"}).save(tmp_path)
    back = FileTokenizer.from_folder(tmp_path)
    assert (back.bos_id, back.eos_ids, back.vocab_size) == (256, (257,), 258)
    assert back.chat(MESSAGES) == "<s>hi"
    assert back.encode("é") == file_tokenizer().encode("é")


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_saved_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = file_tokenizer(chat_template="{{ bos_token }}{{ messages[0].content }}")
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("née <s>")["input_ids"] == ours.encode("née <s>")
    assert theirs.eos_token_id == 257
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == ours.chat(MESSAGES)


def test_templates_come_from_a_list_or_from_a_file_of_their_own(tmp_path):
    file_tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    templates = [{"name": "tools", "template": "tools"}, {"name": "default", "template": "listed"}]
    path.write_text(json.dumps(config | {"chat_template": templates, "bos_token": {"content": "<s>"}}))
    assert FileTokenizer.from_folder(tmp_path).chat(MESSAGES) == "listed"
    assert FileTokenizer.from_folder(tmp_path).bos_id == 256
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert FileTokenizer.from_folder(tmp_path).chat(MESSAGES) == "own file"


def test_tokens_come_from_the_special_tokens_map_when_the_config_lacks_them(tmp_path):
    bytes_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert FileTokenizer.from_folder(tmp_path).eos_ids == (257,)


def test_added_tokens_beyond_the_model_are_dropped_but_a_larger_vocabulary_is_refused():
    backend = bytes_backend()
    backend.add_special_tokens(["<image>"])
    tokenizer = FileTokenizer(backend, bos="<s>")
    assert tokenizer.limited(258).vocab_size == 258
    with pytest.raises(ValueError, match="259 tokens but the model's vocabulary has 100"):
        tokenizer.limited(100)


def test_a_damaged_or_missing_tokenizer_is_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json not found"):
        FileTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="cannot read") as error:
        FileTokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value)
    bytes_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        FileTokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="'<nope>' is not in the tokenizer's vocabulary"):
        FileTokenizer(bytes_backend(), bos="<nope>")


def test_without_a_template_there_is_no_chat():
    for tokenizer in (ByteTokenizer(), file_tokenizer()):
        with pytest.raises(ValueError, match="has no chat template"):
            tokenizer.chat(MESSAGES)


def test_templates_have_what_they_expect():
    template = ("{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m | tojson }}\n"
                "{% endfor %}{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}"
                "{{ add_generation_prompt }}{{ eos_token }}")
    messages = [{"role": "user", "content": "<é>'"}] * 2
    assert chat.render(template, messages, eos_token="E") == '{"role": "user", "content": "<é>\'"}\n4TrueE'


@pytest.mark.parametrize("template, reason", [
    ("{{ ''.__class__.__mro__ }}", "not allowed"),
    ("{{ messages.append(1) }}", "not allowed"),
    ("{{ messages[0].update(role='x') }}", "not allowed"),
    ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    ("{% if %}", "broken"),
    ("{% include '/etc/passwd' %}", "fails|broken"),
    ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
    ("{{ 1 + 'a' }}", "TypeError"),
])
def test_bad_templates_are_one_line(template, reason):
    with pytest.raises(ValueError, match=reason) as error:
        chat.render(template, MESSAGES)
    assert "\n" not in str(error.value)


def test_malformed_messages_are_refused():
    with pytest.raises(ValueError, match="chat message 1 must be a dict with 'role' and 'content'"):
        chat.render("", [*MESSAGES, {"text": "hi"}])
