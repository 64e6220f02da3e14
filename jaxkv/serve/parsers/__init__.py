"""Parsers that split the text of an answer into reasoning, content and tool calls.

| Family | Tool calls | Reasoning |
|---|---|---|
| Qwen2.5, Qwen3, Hermes, Granite 4, SmolLM3, Exaone 4 | hermes | qwen3, deepseek_r1 |
| Qwen3-Coder, Qwen3.5 and 3.6 | qwen3_coder | qwen3 |
| Seed-OSS | seed_oss | seed_oss |
| Llama 3.1 and later | llama3_json; llama4_pythonic if asked for | |
| DeepSeek-V3, R1 | deepseek_v3 | deepseek_r1 |
| DeepSeek-V3.1; V3.2 | deepseek_v31; deepseek_v32 | deepseek_r1 |
| Kimi-K2 | kimi_k2 | deepseek_r1 |
| Mistral, Ministral, Magistral | mistral | mistral |
| GLM-4.5 and later | glm45 | glm45 |
| GPT-OSS | openai | openai_gptoss |
| Granite 3 | granite | granite; granite33 of 3.3 |
| Phi-4-mini | phi4_mini_json | |
| Hunyuan, Jamba | hunyuan_a13b | hunyuan_a13b |
| Nemotron Nano 2 | nemotron_json | deepseek_r1 |
| LFM2 | lfm2 | deepseek_r1 |
| OLMo-3 | olmo3 | deepseek_r1 |
| Cohere Command | cohere_command3 | cohere_command3 |

The names are vLLM's where it has one; `OTHER_NAMES` has further ones of vLLM's for the same formats.
"""
