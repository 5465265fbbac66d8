"""Chat templates."""

from __future__ import annotations

import pytest

from trtspec.errors import TrtspecError
from trtspec.models.tokenizer import render_chat

CHAT = [{"role": "user", "content": "Hi {{ 7 * 7 }}"}, {"role": "assistant", "content": "Hello"}]
TEMPLATE = """{% for message in messages %}
    {% if message['role'] == 'system' %}
        {{ raise_exception('no system role') }}
    {% endif %}
<{{ message['role'] }}>{{ message['content'] }}{{ eos }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_blocks_leave_no_blanks_and_content_is_not_interpreted() -> None:
    assert render_chat(TEMPLATE, CHAT, eos="</s>") == ("<user>Hi {{ 7 * 7 }}</s>\n<assistant>Hello</s>\n<assistant>")
    assert render_chat(TEMPLATE, CHAT[:1], add_generation_prompt=False, eos="") == "<user>Hi {{ 7 * 7 }}\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        (TEMPLATE, "no system role"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "refuses the conversation"),
    ],
)
def test_what_cannot_be_rendered_is_one_clear_error(template: str | None, message: str) -> None:
    with pytest.raises(TrtspecError, match=message):
        render_chat(template, [{"role": "system", "content": "x"}])
