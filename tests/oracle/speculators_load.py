"""speculators' own loader on an exported drafter.

`python speculators_load.py FOLDER OUT.safetensors`: OUT holds the loaded tensors under their names there; what is
printed is the configuration as speculators reads it, as JSON.
"""

import json
import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

from safetensors.torch import save_file
from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig, SpeculatorModelConfig

folder, out = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(folder)
assert isinstance(config, Eagle3SpeculatorConfig), type(config)
model = Eagle3DraftModel.from_pretrained(folder)
layer = config.transformer_layer_config
found = {
    "ids": config.eagle_aux_hidden_state_layer_ids,
    "norm_before_residual": config.norm_before_residual,
    "rope": layer.rope_parameters,
    "sizes": [layer.hidden_size, layer.intermediate_size, layer.num_key_value_heads, layer.head_dim, layer.vocab_size],
    "verifier": config.speculators_config.verifier.name_or_path,
    "tokens": config.speculators_config.proposal_methods[0].speculative_tokens,
}
save_file({k: v.contiguous() for k, v in model.state_dict().items()}, out, {"found": json.dumps(found)})
print(json.dumps(found))
