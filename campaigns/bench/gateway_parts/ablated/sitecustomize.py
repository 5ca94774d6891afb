"""Runs first in each process of an ablated stack, and switches off the mechanism that its environment names."""

import os
import traceback

if name := os.environ.get("NEMO_GYM_ABLATION"):
    try:
        from campaigns.bench.gateway_parts.mechanisms import MECHANISMS

        MECHANISMS[name].switch_off()
    except BaseException:
        # Python itself would go on without this file, and the ablation would measure nothing.
        traceback.print_exc()
        os._exit(1)
