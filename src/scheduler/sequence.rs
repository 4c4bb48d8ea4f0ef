//! One request as the scheduler sees it: tokens, and how many of them have their K and V in the cache.

use super::prefixes::Pinning;
use super::queue::Ticket;
use crate::ids::{RequestId, SeqSlot, TokenId};
use crate::kv::{BlockTable, CacheKey, PrefixChain, SwappedTable};
use crate::protocol::{FinishReason, SamplingParams, StopRules, Usage};
use rustc_hash::FxHashMap;

/// What [`super::Scheduler::add`] takes.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct NewSequence {
    /// Unique for the life of the scheduler, ascending in order of arrival.
    pub id: RequestId,
    pub prompt: Vec<TokenId>,
    /// Already validated; its `seed` is not read.
    pub sampling: SamplingParams,
    /// The seed of the request, or the one drawn for it.
    pub seed: u64,
    pub stop: StopRules,
    /// The model's end-of-sequence tokens.
    pub eos_ids: Vec<TokenId>,
    /// Under the priority policies the lowest runs first, and the highest gives way first.
    pub priority: i32,
    /// Prefix blocks are shared only between equal salts.
    pub cache_salt: u64,
    /// The weights' adapter; prefix blocks are shared only between equal ones. 0 is none.
    pub adapter: u64,
    /// Whose request it is: the fair policy shares between clients.
    pub client: u64,
}

/// What a sequence has of its table, see the fields of [`Sequence`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    pub num_computed: u32,
    pub num_valid: u32,
    pub num_public: u32,
}

/// Where a sequence may find blocks besides the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ForkOf {
    pub parent: RequestId,
    /// The first tokens that are the parent's.
    pub keep_tokens: u32,
}

/// Where a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeqStatus {
    Waiting,
    Running,
}

/// A token that the sequence has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCount {
    pub token: TokenId,
    /// Occurrences in the output; 0 when it is in the prompt only.
    pub output_count: u32,
}

/// A live request. The scheduler is the only one that changes it.
#[derive(Debug)]
pub struct Sequence {
    pub(super) id: RequestId,
    pub(super) sampling: SamplingParams,
    pub(super) seed: u64,
    pub(super) biases: Vec<(TokenId, f32)>,
    pub(super) stop: StopRules,
    pub(super) stop_ids: Vec<TokenId>,
    pub(super) key: CacheKey,
    /// Its blocks are to be pinned when it ends.
    pub(super) pin: Option<Box<Pinning>>,
    /// Its place in the queue.
    pub(super) ticket: Ticket,
    /// Prompt, then output.
    pub(super) tokens: Vec<TokenId>,
    pub(super) num_prompt: u32,
    /// At most this many tokens, prompt included.
    pub(super) max_total: u32,
    pub(super) num_computed: u32,
    /// Positions whose K and V the table's blocks hold: `num_computed`, or one more where the last known token came with
    /// shared blocks and is computed only for its logits.
    pub(super) num_valid: u32,
    /// Positions that may be found by prefix: computed before the sequence was to end.
    pub(super) num_public: u32,
    /// The largest `num_computed` there ever was: what is below it and computed again is recompute.
    pub(super) computed_peak: u32,
    /// Tokens being sampled by the step in flight: planned with, but neither known nor hashed yet.
    pub(super) num_pending: u32,
    pub(super) status: SeqStatus,
    pub(super) slot: Option<SeqSlot>,
    pub(super) table: BlockTable,
    pub(super) chain: PrefixChain,
    pub(super) preemptions: u32,
    /// What a preemption left in host memory to come back to.
    pub(super) swapped: Option<SwappedTable>,
    /// The first block that the step in flight brings back from host memory.
    pub(super) restored_from: Option<u32>,
    /// Prompt tokens found at the first admission; `None` before it.
    pub(super) cached_tokens: Option<u32>,
    /// Set when the sequence is to end as soon as the step in flight is over.
    pub(super) is_ending: bool,
    pub(super) fork_of: Option<ForkOf>,
    /// The search that it is a beam of.
    pub(super) gang: Option<RequestId>,
    counts: Option<TokenCounts>,
}

impl Sequence {
    /// `since` is the step of its arrival.
    pub(super) fn new(new: NewSequence, chain: PrefixChain, max_total: u32, since: u64) -> Self {
        let mut stop_ids = new.stop.stop_token_ids.clone();
        if !new.stop.ignore_eos {
            stop_ids.extend_from_slice(&new.eos_ids);
        }
        let num_prompt = new.prompt.len() as u32;
        let mut seq = Sequence {
            id: new.id,
            biases: merge_biases(&new.sampling.logit_bias),
            counts: new.sampling.has_penalties().then(|| TokenCounts::new(&new.prompt)),
            sampling: new.sampling,
            seed: new.seed,
            stop: new.stop,
            stop_ids,
            key: CacheKey { salt: new.cache_salt, adapter: new.adapter },
            pin: None,
            ticket: Ticket {
                id: new.id,
                client: new.client,
                priority: new.priority,
                since,
                cached_tokens: 0,
                cost: num_prompt,
                is_resumed: false,
            },
            tokens: new.prompt,
            num_prompt,
            max_total,
            num_computed: 0,
            num_valid: 0,
            num_public: 0,
            computed_peak: 0,
            num_pending: 0,
            status: SeqStatus::Waiting,
            slot: None,
            table: BlockTable::new(new.id),
            chain,
            preemptions: 0,
            swapped: None,
            restored_from: None,
            cached_tokens: None,
            is_ending: false,
            fork_of: None,
            gang: None,
        };
        seq.chain.extend(&seq.tokens);
        seq
    }

    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Prompt, then output.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    pub fn num_tokens(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub fn num_prompt(&self) -> u32 {
        self.num_prompt
    }

    pub fn num_output(&self) -> u32 {
        self.num_tokens() - self.num_prompt
    }

    pub fn output(&self) -> &[TokenId] {
        &self.tokens[self.num_prompt as usize..]
    }

    /// Positions `0..num_computed` have their K and V in the cache.
    pub fn num_computed(&self) -> u32 {
        self.num_computed
    }

    /// Tokens that the step in flight samples for this sequence.
    pub fn num_pending(&self) -> u32 {
        self.num_pending
    }

    /// The request that this one was forked from.
    pub fn parent(&self) -> Option<RequestId> {
        self.gang.filter(|_| self.is_follower()).or(self.fork_of.map(|fork| fork.parent))
    }

    /// Known tokens whose K and V are not in the cache yet; at least 1 while the sequence lives.
    pub fn num_remaining(&self) -> u32 {
        self.num_tokens() - self.num_computed
    }

    /// At most this many tokens, prompt included.
    pub fn max_total(&self) -> u32 {
        self.max_total
    }

    pub fn status(&self) -> SeqStatus {
        self.status
    }

    /// Fixed from admission to the end or a preemption.
    pub fn slot(&self) -> Option<SeqSlot> {
        self.slot
    }

    pub fn table(&self) -> &BlockTable {
        &self.table
    }

    pub fn preemptions(&self) -> u32 {
        self.preemptions
    }

    /// What it left in host memory when it was preempted.
    pub fn swapped(&self) -> Option<&SwappedTable> {
        self.swapped.as_ref()
    }

    /// Prompt tokens found in the prefix cache at the first admission; `None` before it.
    pub fn cached_tokens(&self) -> Option<u32> {
        self.cached_tokens
    }

    /// What its prefix blocks are shared by, besides the tokens.
    pub fn cache_key(&self) -> CacheKey {
        self.key
    }

    /// The LoRA adapter that it has; 0 is none.
    pub fn adapter(&self) -> u64 {
        self.key.adapter
    }

    pub fn priority(&self) -> i32 {
        self.ticket.priority
    }

    /// Whose request it is.
    pub fn client(&self) -> u64 {
        self.ticket.client
    }

    pub fn sampling(&self) -> &SamplingParams {
        &self.sampling
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The tokens that penalties look at, each once, in order of first appearance; empty when no penalty is on.
    pub fn token_counts(&self) -> &[TokenCount] {
        self.counts.as_ref().map_or(&[], |counts| &counts.list)
    }

    /// The bias list, each token once.
    pub fn biases(&self) -> &[(TokenId, f32)] {
        &self.biases
    }

    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.num_prompt,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            output_tokens: self.num_output(),
            preemptions: self.preemptions,
        }
    }

    /// The search that this sequence is a beam of: the id of its leader.
    pub fn gang(&self) -> Option<RequestId> {
        self.gang
    }

    /// A beam that another one stands for in the queue.
    pub fn is_follower(&self) -> bool {
        self.gang.is_some_and(|gang| gang != self.id)
    }

    /// A further beam of the same search, without blocks or a slot; see [`Self::copy_progress`].
    pub(super) fn beam(&self, id: RequestId) -> Sequence {
        Sequence {
            id,
            sampling: self.sampling.clone(),
            biases: self.biases.clone(),
            stop: self.stop.clone(),
            stop_ids: self.stop_ids.clone(),
            tokens: self.tokens.clone(),
            table: BlockTable::new(id),
            chain: self.chain.clone(),
            counts: self.counts.clone(),
            status: SeqStatus::Waiting,
            slot: None,
            pin: None,
            swapped: None,
            fork_of: None,
            ..*self
        }
    }

    /// Takes over all that another beam knows and has computed; the blocks are the caller's matter.
    pub(super) fn copy_progress(&mut self, source: &Sequence) {
        self.tokens.clone_from(&source.tokens);
        self.chain = source.chain.clone();
        self.counts.clone_from(&source.counts);
        self.set_progress(source.progress());
        self.computed_peak = source.computed_peak;
    }

    /// Appends a token without asking whether it is the last.
    pub(super) fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
        self.chain.extend(&self.tokens);
        if let Some(counts) = &mut self.counts {
            counts.add_output(token);
        }
    }

    /// Appends a sampled token and says whether it was the last.
    pub(super) fn append(&mut self, token: TokenId) -> Option<FinishReason> {
        self.push(token);
        if self.num_output() > self.stop.min_tokens && self.stop_ids.contains(&token) {
            return Some(FinishReason::StopToken(token));
        }
        if self.stop.max_tokens.is_some_and(|max| self.num_output() >= max) {
            return Some(FinishReason::MaxTokens);
        }
        (self.num_tokens() >= self.max_total).then_some(FinishReason::ContextFull)
    }

    pub(super) fn progress(&self) -> Progress {
        Progress { num_computed: self.num_computed, num_valid: self.num_valid, num_public: self.num_public }
    }

    pub(super) fn set_progress(&mut self, progress: Progress) {
        Progress { num_computed: self.num_computed, num_valid: self.num_valid, num_public: self.num_public } = progress;
    }

    /// Back to the state of a request that has not run, tokens kept.
    pub(super) fn reset_progress(&mut self) {
        self.set_progress(Progress::default());
        self.num_pending = 0;
        self.status = SeqStatus::Waiting;
        self.slot = None;
    }
}

/// Several entries for one token add up, as adding each to the logit would.
fn merge_biases(list: &[(TokenId, f32)]) -> Vec<(TokenId, f32)> {
    let mut merged: Vec<(TokenId, f32)> = Vec::with_capacity(list.len());
    let mut place: FxHashMap<TokenId, usize> = FxHashMap::default();
    for &(token, bias) in list {
        match place.get(&token) {
            Some(&at) => merged[at].1 += bias,
            None => {
                place.insert(token, merged.len());
                merged.push((token, bias));
            }
        }
    }
    merged
}

/// Kept up to date token by token, so that a step copies a list and counts nothing.
#[derive(Clone, Debug)]
struct TokenCounts {
    list: Vec<TokenCount>,
    place: FxHashMap<TokenId, usize>,
}

impl TokenCounts {
    fn new(prompt: &[TokenId]) -> Self {
        let mut counts = TokenCounts { list: Vec::new(), place: FxHashMap::default() };
        for &token in prompt {
            counts.entry(token);
        }
        counts
    }

    fn add_output(&mut self, token: TokenId) {
        let at = self.entry(token);
        self.list[at].output_count += 1;
    }

    fn entry(&mut self, token: TokenId) -> usize {
        let list = &mut self.list;
        *self.place.entry(token).or_insert_with(|| {
            list.push(TokenCount { token, output_count: 0 });
            list.len() - 1
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{KvCache, KvConfig, KvGroups};

    fn sequence(stop: StopRules, sampling: SamplingParams) -> Sequence {
        let kv =
            KvCache::new(KvConfig { num_blocks: 4, block_size: 4, groups: KvGroups::ONE, enable_prefix_cache: true });
        let new = NewSequence {
            id: RequestId(1),
            prompt: vec![5, 6, 5],
            sampling,
            seed: 0,
            stop,
            eos_ids: vec![2],
            cache_salt: 0,
            adapter: 0,
            priority: 0,
            client: 0,
        };
        Sequence::new(new, kv.new_chain(CacheKey::default()), 8, 0)
    }

    #[test]
    fn penalty_counts_tell_prompt_from_output() {
        let mut seq =
            sequence(StopRules::max_tokens(9), SamplingParams { presence_penalty: 1.0, ..SamplingParams::greedy() });
        for token in [6, 9, 9] {
            seq.append(token);
        }
        let counts: Vec<_> = seq.token_counts().iter().map(|c| (c.token, c.output_count)).collect();
        assert_eq!(counts, [(5, 0), (6, 1), (9, 2)]);
        assert!(sequence(StopRules::max_tokens(9), SamplingParams::greedy()).token_counts().is_empty());
    }

    #[test]
    fn biases_of_one_token_add_up() {
        assert_eq!(merge_biases(&[(3, 1.0), (4, 2.0), (3, 0.5)]), [(3, 1.5), (4, 2.0)]);
    }

    #[test]
    fn the_first_rule_that_holds_ends_the_output() {
        let mut by_eos = sequence(StopRules::max_tokens(2), SamplingParams::greedy());
        assert_eq!(by_eos.append(7), None);
        assert_eq!(by_eos.append(2), Some(FinishReason::StopToken(2)), "the stop token goes before the count");

        let mut by_count = sequence(StopRules::max_tokens(2), SamplingParams::greedy());
        assert_eq!((by_count.append(7), by_count.append(7)), (None, Some(FinishReason::MaxTokens)));

        let unbounded = StopRules { max_tokens: None, ignore_eos: true, ..StopRules::max_tokens(1) };
        let mut by_context = sequence(unbounded, SamplingParams::greedy());
        let reasons = [2, 2, 2, 2, 2].map(|t| by_context.append(t));
        assert_eq!(reasons, [None, None, None, None, Some(FinishReason::ContextFull)]);
    }

    #[test]
    fn stop_tokens_do_not_count_before_min_tokens() {
        let rules = StopRules { min_tokens: 2, ..StopRules::max_tokens(9) };
        let mut seq = sequence(rules, SamplingParams::greedy());
        assert_eq!([2, 2, 2].map(|t| seq.append(t)), [None, None, Some(FinishReason::StopToken(2))]);
    }
}
