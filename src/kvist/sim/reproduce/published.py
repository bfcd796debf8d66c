"""What Mooncake's papers report and what their testbed was: the figures that ours stand beside.

Source: Mooncake, FAST'25, the figure or table named at each; the traces are those of its
repository. The conversation trace has 12,031 requests, the synthetic one 3,993; the third one of
the paper (tool & agent) is not among the traces here.
"""

from __future__ import annotations

CONVERSATION, SYNTHETIC = "conversation", "synthetic"

# The testbed: nodes of 8 A800, dummy LLaMA3-70B; 1 TB of DRAM holds about 3 M tokens.
NODES = 16
MODEL, DEVICE, DEVICES_PER_NODE = "llama-3-70b", "a800", 8
POOL_TOKENS = 3_000_000
LINE_RATES_GBIT = (24, 50, 100, 200, 400)

# Fig. 9: token hit ratio of one pool as a share of that of an endless one.
IDEAL_HIT = {CONVERSATION: 0.40, SYNTHETIC: 0.66}
SHARE_AT_POOL = {CONVERSATION: 0.41, SYNTHETIC: 0.46}
LARGE_POOL_TOKENS = 50_000_000

# Fig. 5: mean TTFT in seconds by scheduling of the prefill nodes.
SCHEDULING_TTFT_S = {"random": 19.65, "load": 5.27, "local": 3.58, "global": 3.07}

# Figs. 6-7: gain in requests that meet TTFT 30 s and the TBT limit, over vLLM.
TTFT_LIMIT_S = 30.0
TBT_LIMITS_S = (0.1, 0.2, 0.3)
CAPACITY_GAIN = {CONVERSATION: (4.98, 1.57, 0.59), SYNTHETIC: (0.62, 0.40, 0.28)}

# Fig. 8: prefill GPU time over Mooncake's.
VLLM_PREFILL = {CONVERSATION: 1.56, SYNTHETIC: 2.76}
VLLM_PREFIX_PREFILL = {CONVERSATION: 1.43, SYNTHETIC: 2.59}

# Fig. 10: ten prefill nodes, one token of output, global cache over local caches.
SHARING_NODES = 10
GLOBAL_HIT = {CONVERSATION: 2.22, SYNTHETIC: 2.36}
GLOBAL_PREFILL = {CONVERSATION: 0.76, SYNTHETIC: 0.52}

# Fig. 13: mean TTFT stays below this from 100 Gb/s on and collapses below.
BANDWIDTH_TTFT_S = 2.0
BANDWIDTH_KNEE_GBIT = 100

# Fig. 15: share of requests within 10 s and 100 ms, by prefill nodes of 16.
RATIO_LIMITS_S = (10.0, 0.1)
RATIO_SHARES = {5: 0.78, 6: None, 7: 0.99, 8: 0.99, 9: 0.99, 10: None, 11: 0.86}
