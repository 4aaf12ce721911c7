"""Kimi K2: DeepSeek-V3 with more experts and fewer heads, under a name of its own."""

from jaxllm.models.deepseek_v3 import DEFAULTS as DEFAULTS
from jaxllm.models.deepseek_v3 import NAMES as NAMES
from jaxllm.models.deepseek_v3 import REMOTE_CODE as REMOTE_CODE
from jaxllm.models.deepseek_v3 import build as build
from jaxllm.models.deepseek_v3 import spec as spec
from jaxllm.models.deepseek_v3 import unused as unused
