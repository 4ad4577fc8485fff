"""Faults of real engines, as edits of jspec. What each check says of them is what it says today: any violation kills."""

from mutants.kit import Edit, Mutant

PLAN, RESERVE, SETTLE = "jspec.scheduler.plan", "jspec.scheduler.reserve:reserve", "jspec.scheduler.settle:settle"
RELEASE, FINISH, ADMIT = "jspec.scheduler.release:release", "jspec.scheduler.finish", "jspec.scheduler.admit"
CACHE, CHAIN = "jspec.scheduler.prefix_cache", "jspec.spec_workers.chain:chain"

MUTANTS = [
    # --- clocks --------------------------------------------------------------------------------------------------------
    Mutant(
        "pre-claimed bonus",
        "sgl-project/sglang pull request 28754",
        "a plan counts one token as committed that the step has yet to write",
        (
            Edit(
                f"{PLAN}:_decode_batch",
                "    return replace(state, requests=requests, ledger=ledger), batch",
                "    ledger = replace(ledger, kv_committed_len=add_at(ledger.kv_committed_len, rows, 1))\n"
                "    return replace(state, requests=requests, ledger=ledger), batch",
            ),
        ),
        "explore: a request",
        "a plan commits prompts only",
    ),
    Mutant(
        "one reserve window",
        "NVIDIA/TensorRT-LLM pull request 16280",
        "a reserve forgets the launch under way",
        (
            Edit(
                RESERVE,
                "wanted = ceil_div(ledger.kv_committed_len + (depth + 1) * alloc_len, page)",
                "wanted = ceil_div(ledger.kv_committed_len + depth * alloc_len, page)",
            ),
            Edit(
                "jspec.state.scheduler_state:Limits.reserve_len",
                "(self.depth + 1) * self.alloc_len",
                "self.depth * self.alloc_len",
            ),
        ),
        "explore: pages of a token",
        "a launch writes inside its allocation",
    ),
    Mutant(
        "allocated length not on a page's end",
        "sgl-project/sglang-jax issue 70",
        "what is recorded as allocated is not what was taken from the pool",
        (
            Edit(
                RESERVE,
                "kv_allocated_len=xp.where(granted, (held + count) * page, ledger.kv_allocated_len)",
                "kv_allocated_len=xp.where(granted, ledger.kv_committed_len + (depth + 1) * alloc_len, ledger.kv_allocated_len)",
            ),
        ),
        "explore: windows that fill pages badly",
        "a reserved length is page aligned",
    ),
    Mutant(
        "allocation shrinks to what is committed",
        "lablup/mlxcel issue 994",
        "a rejected draft's positions are given back although the next step is already writing there",
        (
            Edit(
                SETTLE,
                "kv_committed_len=add_at(ledger.kv_committed_len, rows, num_new * launched.commits))",
                "kv_committed_len=add_at(ledger.kv_committed_len, rows, num_new * launched.commits), kv_allocated_len=xp.minimum("
                "ledger.kv_allocated_len, add_at(ledger.kv_committed_len, rows, num_new * launched.commits)))",
            ),
        ),
        "explore: a request",
        "a settle keeps whoever did not end",
    ),
    Mutant(
        "a tail's token is not committed",
        "sgl-project/sglang pull request 26201",
        "running requests that ride along emit a token whose KV nobody counts",
        (
            Edit(
                "jspec.state.results:record",
                "commits=np.arange(batch.rows.shape[0] + tails.shape[0]) >= batch.rows.shape[0]",
                "commits=np.zeros(batch.rows.shape[0] + tails.shape[0], bool)",
            ),
        ),
        "explore: two rows",
        "KV is committed as far as tokens were accepted, and no other",
    ),
    Mutant(
        "an unfinished prompt is decoded",
        "vllm-project/vllm pull request 34871",
        "a row whose last chunk is still to come is taken for a decode row",
        (Edit(f"{PLAN}:launchable", "& filled & ", "& "),),
        "explore: chunks",
        "the device knows the row's pages",
    ),
    # --- results that come late ------------------------------------------------------------------------------------------
    Mutant(
        "a late result is applied to whoever has the row",
        "vllm-project/vllm pull request 49620",
        "the result of a step that was under way when its request left the row counts for the next one",
        (
            Edit(
                SETTLE,
                "live = (requests.epoch[rows] == launched.epochs) & (rows > 0)",
                "live = (requests.serial[rows] > 0) & (rows > 0)",
            ),
        ),
        "explore: one row after another",
        "a late result changes nothing",
    ),
    Mutant(
        "a row is reused before its epoch moves on",
        "sgl-project/sglang pull request 18803",
        "a row comes free, and what is under way with it still names it rightly",
        (Edit(RELEASE, "epoch=add_at(requests.epoch, rows, xp.where(rows > 0, 1, 0))", "epoch=requests.epoch"),),
        "explore: one row after another",
        "a request that ended has left its row, and its epoch is over",
    ),
    Mutant(
        "a launch is not recorded",
        "sgl-project/sglang-jax pull request 1504",
        "the next step of a row expects what an older launch left in the relay",
        (
            Edit(
                f"{PLAN}:_decode_batch",
                "requests = replace(state.requests, last_launch=set_at(state.requests.last_launch, rows, forward_iter))",
                "requests = state.requests",
            ),
        ),
        "explore: a request",
        "the relay row holds what the launch before left",
    ),
    Mutant(
        "an abort outlives its request",
        "smg-project/smg pull request 2426",
        "whoever gets the row next is aborted with it",
        (Edit(RELEASE, "to_finish=set_at(requests.to_finish, rows, False)", "to_finish=requests.to_finish"),),
        "explore: one row after another",
        "no prompt of an aborted request is launched",
    ),
    # --- ends -------------------------------------------------------------------------------------------------------------
    Mutant(
        "tokens past a stop are shown",
        "vllm-project/vllm pull request 47616",
        "the rest of an accepted run follows the token that ends the request",
        (
            Edit(
                SETTLE,
                "visible_end = xp.where(aborted, end, xp.minimum(stop_end, cut))",
                "visible_end = xp.where(aborted, end, cut)",
            ),
        ),
        "explore: a request",
        "a run is taken as plain decoding would",
    ),
    Mutant(
        "only a run's last token can end it",
        "huggingface/transformers issue 47912",
        "an end-of-sequence token in the middle of an accepted run is passed over",
        (
            Edit(
                SETTLE,
                "xp.where(is_stop, place[:, None], NEVER)",
                "xp.where(is_stop & (place[:, None] == result.accept_lens), place[:, None], NEVER)",
            ),
        ),
        "explore: a request",
        "a run is taken as plain decoding would",
    ),
    Mutant(
        "the cap hides a stop within it",
        "sgl-project/sglang issue 31599",
        "a run that holds a stop and comes to the cap ends by length",
        (Edit(SETTLE, "(stop_end <= cut) * _STOP", "((stop_end <= cut) & (end < limit)) * _STOP"),),
        "explore: a request",
        "a run is taken as plain decoding would",
    ),
    Mutant(
        "a stop string beats an earlier token",
        "sgl-project/sglang pull request 23802",
        "of two stops in a run the later one is taken",
        (
            Edit(
                SETTLE,
                "stop_end = start + xp.minimum(xp.min(xp.where(is_stop, place[:, None], NEVER), axis=0), result.stop_at)",
                "first = xp.min(xp.where(is_stop, place[:, None], NEVER), axis=0)\n"
                "    stop_end = start + xp.where(result.stop_at < NEVER, result.stop_at, first)",
            ),
        ),
        "explore: stops of both kinds",
        "a run is taken as plain decoding would",
    ),
    Mutant(
        "one token more than asked for",
        "vllm-project/vllm pull request 53812",
        "the length rule is off by one",
        (Edit(SETTLE, "(end >= limit) * _LENGTH", "(end > limit) * _LENGTH"),),
        "explore: a request of single tokens",
        "a run is taken as plain decoding would",
    ),
    Mutant(
        "tokens from logits that are not finite",
        "vllm-project/vllm issue 53029",
        "what a NaN was made into is emitted",
        (Edit(SETTLE, "num_new = result.accept_lens * (live & ~bad)", "num_new = result.accept_lens * live"),),
        "explore: logits that are not finite",
        "a run is taken as plain decoding would",
    ),
    Mutant(
        "an abort is forgotten in the queue",
        "sgl-project/sglang pull request 6855",
        "a request that waits is told to be gone, and runs on to its cap",
        (
            Edit(
                f"{FINISH}:abort",
                "return replace(state, waiting=state.waiting.remove(request)), Aborted.WAITING",
                "return state, Aborted.WAITING",
            ),
        ),
        "explore: one row after another",
        "an abort ends one waiting request, and no other",
    ),
    Mutant(
        "an abort is forgotten between two chunks",
        "sgl-project/sglang-jax pull request 1471",
        "a prompt that is to be aborted is prefilled to its end",
        (
            Edit(
                f"{PLAN}:_end_aborted_prompts",
                "& state.requests.to_finish)[0]:",
                "& state.requests.to_finish & False)[0]:",
            ),
        ),
        "explore: chunks",
        "no prompt of an aborted request is launched",
    ),
    # --- pages ------------------------------------------------------------------------------------------------------------
    Mutant(
        "pages are freed twice",
        "sgl-project/sglang-jax pull request 982",
        "two places free what a finished request held",
        (
            Edit(
                f"{FINISH}:retire",
                "np.array(list(page_keys), np.int32)",
                "np.array([*page_keys, *page_keys], np.int32)",
            ),
        ),
        "explore: a request",
        "a transition raised",
    ),
    Mutant(
        "what a finished request reserved is not returned",
        "sgl-project/sglang-jax issue 1147",
        "a release frees what was committed, not what was allocated",
        (Edit(RELEASE, "held = num_pages_held(ledger)[rows]", "held = -(-ledger.kv_committed_len[rows] // page)"),),
        "explore: a request",
        "free + cached + held == total",
    ),
    Mutant(
        "shared pages are freed with a request's own",
        "sgl-project/sglang pull request 18694",
        "a release frees pages that the cache freed before, or still holds",
        (
            Edit(
                RELEASE,
                "leaving = (col >= protected[:, None]) & (col < held[:, None])\n    count = xp.where(rows > 0, held - protected, 0)",
                "protected = 0 * protected\n    leaving = (col >= protected[:, None]) & (col < held[:, None])\n    count = xp.where(rows > 0, held, 0)",
            ),
        ),
        "explore: prompts alike",
        "free + cached + held == total",
    ),
    Mutant(
        "a duplicate page is not returned",
        "lightseekorg/tokenspeed issue 767",
        "a request that ends with pages of a cached prefix drops its own copies",
        (Edit(f"{CACHE}:cache_prefix", "double.append(int(table[i]))", "pass"),),
        "explore: prompts alike",
        "free + cached + held == total",
    ),
    Mutant(
        "a running row's duplicates are freed under it",
        "sgl-project/mini-sglang pull request 142",
        "the cache keeps one of two equal pages, and frees the one that the device reads",
        (Edit(f"{CACHE}:cache_prefix", "elif running:", "elif running and False:"),),
        "explore: prompts alike",
        "the device knows the row's pages",
    ),
    Mutant(
        "a shared page is not locked",
        "sgl-project/mini-sglang pull request 52",
        "what a request begins with can be evicted while it reads it",
        (
            Edit(
                "jspec.scheduler.extend:share_prefix",
                "page_locks=count_at(ledger.page_locks, pages, 1, pages > 0)",
                "page_locks=ledger.page_locks",
            ),
        ),
        "explore: prompts alike",
        "a page is locked once a row that reads it",
    ),
    Mutant(
        "locked pages count as evictable",
        "UbiquitousLearning/mllm pull request 656",
        "room is counted that is not there",
        (Edit(f"{CACHE}:evictable", "(cache.depth > 0) & (ledger.page_locks == 0)", "cache.depth > 0"),),
        "explore: prompts alike, few pages",
        "a launch writes to pages of its own",
    ),
    Mutant(
        "a prefix is shared one token too far",
        "sgl-project/sglang pull request 10846",
        "a page's name leaves out the next token, on which the draft's KV at its last position depends",
        (
            Edit(
                "jspec.state.prefix_cache:page_keys",
                "tokens[i * page_size : (i + 1) * page_size + lookahead].tobytes()",
                "tokens[i * page_size : (i + 1) * page_size].tobytes()",
            ),
        ),
        "explore: prompts that part behind a page",
        "a name stands for one prefix",
    ),
    Mutant(
        "a prompt is cached whole",
        "mmcdermott/MEDS_EIC_AR issue 176",
        "nothing is left to prefill, and the forward has no token",
        (
            Edit(
                f"{ADMIT}:_new_row",
                "most = (request.fill_len - 1) // state.ledger.page_size",
                "most = request.fill_len // state.ledger.page_size",
            ),
        ),
        "explore: prompts alike",
        "somebody waits or runs, so something is launched or under way",
    ),
    Mutant(
        "a prefix is handed over one page too far",
        "sgl-project/sglang-jax pull request 994",
        "the cache is given a page that the request is still writing to",
        (
            Edit(
                f"{CACHE}:cache_prefix",
                "cache_protected_len=set_at(ledger.cache_protected_len, row, len(keys) * ledger.page_size)",
                "cache_protected_len=set_at(ledger.cache_protected_len, row, (len(keys) + 1) * ledger.page_size)",
            ),
        ),
        "explore: a request",
        "protected <= committed <= allocated",
    ),
    Mutant(
        "a chunk ends in the middle of a page",
        "sgl-project/sglang pull request 38941",
        "two chunks, or a chunk and the cache, share a page",
        (
            Edit(
                f"{ADMIT}:chunk_len",
                "return max(min(start + budget, end - lookahead) // page_size * page_size - start, 0)",
                "return max(min(start + budget, end - lookahead) - start, 0)",
            ),
        ),
        "explore: chunks",
        "a chunk ends at a page's end",
    ),
    Mutant(
        "no page for the end of a window",
        "vllm-project/vllm pull request 16370",
        "pages of a reserve are rounded down",
        (
            Edit(
                "jspec.scheduler.reserve:max_new_pages",
                "return -(-(depth + 1) * alloc_len // page_size)",
                "return (depth + 1) * alloc_len // page_size",
            ),
        ),
        "explore: windows that fill pages badly",
        "the page table ends where the allocation ends",
    ),
    # --- admission and retraction ------------------------------------------------------------------------------------------
    Mutant(
        "a retracted request loses a token",
        "vllm-project/vllm pull request 38624",
        "it resumes one token back, and emits that again",
        (Edit("jspec.scheduler.retract:leave", "output_len=output_len)", "output_len=max(output_len - 1, 0))"),),
        "explore: pages run short",
        "a plan keeps every request, with its tokens",
    ),
    Mutant(
        "a retracted request counts the step under way",
        "vllm-project/vllm pull request 42117",
        "it resumes one token ahead, and that one is missing",
        (Edit("jspec.scheduler.retract:leave", "output_len=output_len)", "output_len=output_len + 1)"),),
        "explore: pages run short",
        "a plan keeps every request, with its tokens",
    ),
    Mutant(
        "admission counts tokens, not pages",
        "FlashML-org/FreeToken pull request 367",
        "a piece of a prompt that is less than a page is thought to need none",
        (
            Edit(
                f"{ADMIT}:_Budget.take",
                "new = -(-chosen.end // self.page) - -(-chosen.start // self.page)",
                "new = (chosen.end - chosen.start) // self.page",
            ),
        ),
        "explore: chunks while pages are short",
        "a request keeps its row",
    ),
    Mutant(
        "admission takes what running requests need",
        "sgl-project/sglang pull request 14645",
        "the reserve of the next step is given to a newcomer",
        (
            Edit(
                f"{PLAN}:plan_prefill",
                "admit(state, limits=limits, set_aside=needed) if needed <= room",
                "admit(state, limits=limits, set_aside=0) if True",
            ),
        ),
        "explore: an arrival while pages are short",
        "a request keeps its row",
    ),
    Mutant(
        "requests of one priority drive each other out",
        "vllm-project/vllm issue 25538",
        "a request is taken off before its prefill is settled, comes back, and does the same to the next: for ever",
        (
            Edit(
                f"{ADMIT}:_less_urgent",
                "(requests.priority < head.priority)",
                "(requests.priority <= head.priority)",
            ),
        ),
        "explore: one row after another",
        "the engine makes progress while nobody comes or aborts",
    ),
    Mutant(
        "the beginning of a prefix is evicted first",
        "mstar-project/mstar issue 210",
        "what is behind it stays in the cache, and nobody can find it",
        (
            Edit(
                f"{CACHE}:evict",
                "np.lexsort((-cache.depth[pages], cache.last_used[pages]))",
                "np.lexsort((cache.depth[pages], cache.last_used[pages]))",
            ),
        ),
        "walk",
        "AssertionError",
    ),
    Mutant(
        "a request that has ended stays on record",
        "sgl-project/sglang-omni pull request 611",
        "it is counted as running for ever",
        (Edit(f"{FINISH}:retire", "admitted = admitted.remove(int(state.requests.serial[row]))", "pass"),),
        "explore: a request",
        "who holds a row is on record",
    ),
    # --- the device --------------------------------------------------------------------------------------------------------
    Mutant(
        "a token in the middle of a prompt",
        "vllm-project/vllm pull request 26231",
        "what is sampled at the end of a chunk counts as emitted",
        (Edit(CHAIN, "accept_lens = jnp.where(prompts.goes_on, 0, 1)", "accept_lens = jnp.ones_like(rows)"),),
        "engine",
        "InvariantError: seqlen == kv_committed_len + 1 (the pending bonus token)",
    ),
    Mutant(
        "a tail's + 1 in plain decoding",
        "ohdearquant/lattice pull request 1360",
        "a verify publishes a frontier one past what it accepted, as only a tail's own token may",
        (
            Edit(
                CHAIN,
                "tokens, accept_lens, seq_lens + accept_lens, status)",
                "tokens, accept_lens, seq_lens + accept_lens + 1, status)",
            ),
        ),
        "engine",
        "InvariantError: the frontier leads by what is unsettled",
    ),
    Mutant(
        "a frontier is published before it is known",
        "huggingface/transformers issue 30042",
        "the next step starts one token further, whatever was accepted",
        (
            Edit(
                CHAIN,
                "tokens, accept_lens, seq_lens + accept_lens, status)",
                "tokens, accept_lens, seq_lens + 1, status)",
            ),
        ),
        "engine",
        "InvariantError: the frontier leads by what is unsettled",
    ),
    Mutant(
        "the first token of a run is pending, not its last",
        "vllm-project/vllm pull request 9730",
        "the bonus token's KV is written with another token",
        (Edit(CHAIN, "jnp.maximum(accept_lens[:, None] - 1, 0)", "jnp.zeros_like(accept_lens[:, None])"),),
        "engine",
        "other tokens than plain decoding",
    ),
    Mutant(
        "a rejected draft is kept",
        "ml-explore/mlx-lm pull request 1109",
        "a run is one token longer than what the target agrees to",
        (
            Edit(
                "jspec.spec_workers.accept:accept_chain",
                "return 1 + jnp.sum(jnp.cumprod(matches.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)",
                "return jnp.minimum(width, 2 + jnp.sum(jnp.cumprod(matches.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32))",
            ),
        ),
        "engine",
        "other tokens than plain decoding",
    ),
    Mutant(
        "the relay is read by place in the batch",
        "ggml-org/llama.cpp issue 28286",
        "a request goes on from its neighbour's state",
        (
            Edit(
                "jspec.future_map.relay:resolve",
                "jax.tree.map(lambda buffer: buffer[rows], future.carry)",
                "jax.tree.map(lambda buffer: buffer[jnp.where(rows > 0, jnp.arange(rows.shape[0]) + 1, 0)], future.carry)",
            ),
        ),
        "engine",
        "other tokens than plain decoding",
    ),
    Mutant(
        "padding rows name a live row",
        "sgl-project/sglang pull request 24243",
        "what a batch writes for its padding goes to the first request's row",
        (
            Edit(
                "jspec.spec_workers.upload:pack_extend",
                "    table[:b, 4:EXTEND_COLUMNS] = sampling",
                "    table[b:, 0] = 1\n    table[:b, 4:EXTEND_COLUMNS] = sampling",
            ),
        ),
        "engine",
        "InvariantError: the frontier leads by what is unsettled",
    ),
]
