"""The deliberate breaks that only the whole server notices, over HTTP or through LLM."""

from broken import Break

SERVER = ("tests/api/test_real_server.py",)
OFFLINE = ("tests/api/test_real_offline.py",)
ACCESS = ("tests/api/test_access.py",)
DOOR = ("tests/pure/test_admission.py",)

API_BREAKS = (
    Break(
        "V2: a negative seed is sent as it is",
        "frontend/client/sampling.py",
        "params.seed & _WORD",
        "params.seed",
        (*SERVER, "-k", "limits_are_served"),
    ),
    Break(
        "V2: the core believes its frontends",
        "engine_core/admission.py",
        "        if not 0 <= (getattr(sampling, name) or 0) < bound:\n",
        "        if False:\n",
        DOOR,
    ),
    Break(
        "V6: prompt log-probabilities without bound",
        "frontend/client/sampling.py",
        "    if num_entries > limits.max_prompt_logprob_entries:\n",
        "    if False:\n",
        (*SERVER, "-k", "hostile"),
    ),
    Break(
        "a body nested too deeply is a bug of ours",
        "frontend/http/errors.py",
        "        case RecursionError():\n",
        "        case ZeroDivisionError():\n",
        (*SERVER, "-k", "hostile"),
    ),
    Break(
        "X5: paths that begin like open ones are open",
        "frontend/http/access.py",
        "if path in OPEN_PATHS or",
        "if path.startswith(tuple(OPEN_PATHS)) or",
        (*SERVER, "-k", "x5"),
    ),
    Break(
        "X7: a body that breaks off goes unanswered",
        "frontend/http/asgi.py",
        'raise ApiError(400, "the request\'s body broke off or its chunks are malformed; send it again")',
        "raise ClientLeft",
        (*SERVER, "-k", "bytes_on_the_socket"),
    ),
    Break(
        "any request id is echoed",
        "frontend/http/asgi.py",
        "_REQUEST_ID.fullmatch(given)",
        "_REQUEST_ID.match(given)",
        (*SERVER, "-k", "inject"),
    ),
    Break(
        "Q2: the salt is lost on its way",
        "frontend/http/routes/completions.py",
        "                cache_salt=request.cache_salt,\n",
        "",
        (*SERVER, "-k", "cache_salt"),
    ),
    Break(
        "Q4: all choices draw alike",
        "engine_core/plan_builder.py",
        "np.array([sequence.choice for sequence in sequences], np.int32)",
        "np.array([0 for sequence in sequences], np.int32)",
        (*SERVER, "-k", "q4"),
    ),
    Break(
        "the demo is sampled at temperature 1",
        "frontend/launch/model_source.py",
        'DEMO_SAMPLING = {"temperature": 0.2, "top_p": 0.5}',
        'DEMO_SAMPLING = {"temperature": 1.0}',
        (*SERVER, "-k", "sensibly"),
    ),
    Break(
        "a benchmark counts a refusal without its reason",
        "frontend/bench/stream_client.py",
        "        if self._status in (0, 200):\n",
        "        if True:\n",
        (*SERVER, "-k", "bench_serve"),
    ),
    Break(
        "offline, the limits of the options are ignored",
        "frontend/client/async_llm.py",
        "        check_limits(checked, self._rules.limits)\n",
        "",
        (*OFFLINE, "-k", "limits"),
    ),
    Break(
        "offline, half an integer is rounded in silence",
        "frontend/client/async_llm.py",
        "[operator.index(id) for id in prompt]",
        "[int(id) for id in prompt]",
        (*OFFLINE, "-k", "refused_prompt"),
    ),
    Break(
        "offline, an interrupted start leaves its engine behind",
        "frontend/client/llm.py",
        "            self._interrupt_start()\n",
        "",
        (*OFFLINE, "-k", "interrupt"),
    ),
    Break(
        "offline, an interrupted call is computed to its end",
        "frontend/client/llm.py",
        "            future.cancel()  # an interrupt: what was asked for need not be finished\n",
        "",
        (*OFFLINE, "-k", "interrupt"),
    ),
    Break(
        "offline, a call after the end does not say why",
        "frontend/client/llm.py",
        "            self._end = error\n",
        "",
        (*OFFLINE, "-k", "cannot_be_kept"),
    ),
    Break(
        "X5: a client's key opens the admin routes",
        "frontend/http/access.py",
        "        if is_admin:\n",
        "        if is_admin or place is not None:\n",
        ACCESS,
    ),
    Break(
        "X5: admin routes are there without an admin key",
        "frontend/http/access.py",
        "        if is_for_admins and not self._admins:\n",
        "        if is_for_admins and not self._clients:\n            return None\n        if False:\n",
        ACCESS,
    ),
    Break(
        "offline, steps are short for nobody",
        "frontend/client/llm.py",
        '    _defaults = {"prompt_step": 1.0}\n',
        "    pass\n",
        (*OFFLINE, "-k", "steps_are"),
    ),
    Break(
        "X5: any scheme may carry the key",
        "frontend/http/access.py",
        'if scheme.lower() == b"bearer" else b""',
        'if scheme else b""',
        ("tests/api/test_refusals.py", "-k", "x5"),
    ),
    Break(
        "a rate is counted by each frontend for itself",
        "frontend/launch/configurations.py",
        'rate_file=str(birth.run_directory / "rates")',
        'rate_file=str(birth.run_directory / f"rates-{index}")',
        (*ACCESS, "-k", "one_rate"),
    ),
    Break(
        "a request that is refused for its rate takes from it",
        "frontend/http/rate_limit.py",
        "left - allowed, now_s)",
        "left - 1, now_s)",
        ACCESS,
    ),
    Break(
        "a second wish to drain cuts streams short",
        "frontend/launch/supervisor.py",
        "                if not self._is_draining:  # a second wish is no second signal\n",
        "                if True:\n",
        ACCESS,
    ),
)
