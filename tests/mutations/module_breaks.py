"""Breaks of models that transformers' modelling code computes."""

from broken import Break

DECODERS = ("tests/numerics/test_module_decoders.py", "-m", "not long")
ENCODERS = ("tests/numerics/test_module_encoders.py",)

MODULE_BREAKS = (
    Break(
        "modules: a window of a layer is forgotten",
        "device_workers/models/module_attention.py",
        "scale, layer.window, batch.host",
        "scale, 0, batch.host",
        (*DECODERS, "-k", "phi3_window"),
    ),
    Break(
        "modules: decodes have no soft cap",
        "kernels/in_torch/gathered_attention.py",
        "        q = q_NHD.unsqueeze(2)\n        return _scored(q, keys, values, mask, scoring)",
        "        q = q_NHD.unsqueeze(2)\n        return _scored(q, keys, values, mask, scoring._replace(soft_cap=0.0))",
        ("tests/numerics/test_kernels.py", "-k", "caps"),
    ),
    Break(
        "modules: sinks are forgotten",
        "device_workers/models/module_attention.py",
        "return layer(query, key, value, scaling, s_aux), None",
        "return layer(query, key, value, scaling, None), None",
        (*DECODERS, "-k", "gpt_oss"),
    ),
    Break(
        "modules: the scale is the usual one whatever the module says",
        "device_workers/models/module_attention.py",
        "** -0.5 if scaling is None else float(scaling)",
        "** -0.5",
        (*DECODERS, "-k", "opt"),
    ),
    Break(
        "modules: positions are places in the batch, and nobody tries it",
        "device_workers/models/module_check.py",
        "    if worst < ",
        "    if worst < -2.0 and worst < ",
        (*DECODERS, "-k", "by_place"),
    ),
    Break(
        "modules: weights that are missing stay as they were drawn",
        "device_workers/models/module_decoder.py",
        "    if wrong:\n",
        "    if not wrong and wrong:\n",
        (*DECODERS, "-k", "invented"),
    ),
    Break(
        "modules: a length at which longrope changes is taken",
        "device_workers/models/module_trace.py",
        "            if original < limit:\n",
        "            if original > limit:\n",
        (*DECODERS, "-k", "bound_the_length"),
    ),
    Break(
        "modules: a mask of chunks passes for a window",
        "device_workers/models/module_trace.py",
        "    if sum(near) != count:\n",
        "    if not near:\n",
        (*DECODERS, "-k", "masks_are_read"),
    ),
    Break(
        "modules: vectors of a mixed batch go to other texts",
        "device_workers/models/module_encoder.py",
        "        hidden_TD[torch.cat(places)] = torch.cat(parts)\n",
        "        hidden_TD.copy_(torch.cat(parts))\n",
        (*ENCODERS, "-k", "batched"),
    ),
    Break(
        "modules: a kernel that has no soft cap is taken for one that has",
        "kernels/implementation.py",
        'if misfit is None and self.kernel == "paged_attention":',
        'if misfit is None and self.kernel == "paged":',
        (*DECODERS, "-k", "for_kernels_that_have_them"),
    ),
)
