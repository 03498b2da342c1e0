"""Chat templates in the style of the common families, short, with their habits."""

from __future__ import annotations

LLAMA3 = (  # a date, the system prompt in a header of its own, tools in the first question
    "{{ bos_token }}{% if not date_string is defined %}"
    "{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
    "{% else %}{% set date_string = '1 Jan 2020' %}{% endif %}{% endif %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|start|>system<|end_header|>\n\nToday: {{ date_string }}\n\n{{ system }}<|eot|>"
    "{% for m in messages %}"
    "{% if tools and loop.first %}<|start|>user<|end_header|>\n\n{{ tools | tojson }}\n\n"
    "{{ m['content'] | trim }}<|eot|>"
    "{% elif m.tool_calls %}<|start|>assistant<|end_header|>\n\n"
    "{{ m.tool_calls[0].function | tojson }}<|eot|>"
    "{% else %}<|start|>{{ m['role'] }}<|end_header|>\n\n{{ m['content'] | trim }}<|eot|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end_header|>\n\n{% endif %}"
)
QWEN3 = (  # thoughts are dropped once a question follows; without one an empty one is written
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought = '' %}{% set content = m.content %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (  # the system prompt stands before the LAST question
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST]{% if system is defined and m == messages[-1] or "
    "(system is defined and loop.revindex == 2) %}{{ system }}\n\n{% endif %}{{ m['content'] }}"
    "[/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (  # no system role, the assistant is the model, the end token is not the tokenizer's
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "<|turn|>{{ role }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)
PHI = (  # an end of text behind the whole where nothing is asked for
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
DEEPSEEK = (  # asks with an open thought and writes every answer without its thought
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
MARKED_CONTENT = (  # marks the answer without its end token
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = [
    *("<|start|>", "<|end_header|>", "<|eot|>", "<|turn|>", "<|end|>", "<|user|>", "<|assistant|>"),
    *("<|User|>", "<|Assistant|>"),
]
