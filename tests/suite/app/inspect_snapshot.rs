//! What the small engine tells: totals, queue, prefixes, requests, blocks.

use super::*;
use kvasir::protocol::OwnerTag;
use kvasir::telemetry::{
    ClientShare, HostBlock, KvTotals, PrefixInfo, QueueInfo, QueuePolicy, RequestInfo, RequestState, Tier,
};

impl World {
    pub(super) fn totals(&self) -> KvTotals {
        let count = |f: &dyn Fn(&BlockInfo) -> bool| self.blocks.iter().skip(1).filter(|b| f(b)).count() as u32;
        let swapped = self.host.iter().filter(|p| matches!(p, Place::Swapped(_))).count() as u32;
        KvTotals {
            total: self.blocks.len() as u32 - 1,
            used: count(&|b| b.state == BlockState::Active),
            cached_idle: count(&|b| b.state == BlockState::CachedIdle),
            free: self.free.len() as u32,
            shared: count(&|b| b.refs >= 2),
            saved: self.blocks.iter().map(|b| b.refs.saturating_sub(1)).sum(),
            evicted_this_step: self.record.deltas.iter().filter(|d| matches!(d, BlockDelta::Evict { .. })).count()
                as u32,
            query_tokens: self.counters.query_tokens,
            hit_tokens: self.counters.hit_tokens,
            host_hit_tokens: self.counters.host_hit_tokens,
            pinned: count(&|b| b.pinned),
            host_total: self.host.len() as u32,
            host_swapped: swapped,
            host_cached: self.host_cache.len() as u32,
            ..KvTotals::default()
        }
    }

    fn queue(&self) -> QueueInfo {
        let count = |requests: &mut dyn Iterator<Item = &Live>, owner: u64| {
            requests.filter(|r| r.job.owner == owner).count() as u32
        };
        let clients = self.served.iter().map(|(&owner, (label, served))| ClientShare {
            owner: OwnerTag { id: owner, label: label.clone() },
            served_tokens: *served,
            counter: *served,
            waiting: count(&mut self.waiting.iter(), owner),
            running: count(&mut self.running.iter(), owner),
        });
        let clients = clients.filter(|c| c.waiting + c.running > 0).collect();
        QueueInfo { policy: QueuePolicy::Fair, binding: self.binding, clients }
    }

    fn prefixes(&self) -> Vec<PrefixInfo> {
        let info = |(&key, p): (&u64, &Prefix)| {
            let last = content_hash(key, p.blocks - 1);
            let tier = if self.cache.contains_key(&last) { Tier::Gpu } else { Tier::Host };
            PrefixInfo {
                id: last,
                name: p.is_pinned.then(|| "System prompt".to_owned()),
                tokens: p.blocks * BLOCK_SIZE,
                blocks: p.blocks,
                hits: p.hits,
                hit_tokens: p.hit_tokens,
                host_hit_tokens: 0,
                disk_hit_tokens: 0,
                last_hit_step: p.last_hit_step,
                pinned: p.is_pinned,
                tier,
                cache_salt: 0,
                adapter: 0,
                head: (1..33).map(|i| i + key as u32).collect(),
            }
        };
        let mut prefixes: Vec<PrefixInfo> = self.prefixes.iter().map(info).collect();
        prefixes.sort_by_key(|p| (!p.pinned, std::cmp::Reverse(p.hits), p.id));
        prefixes
    }

    pub fn snapshot(&self) -> EngineSnapshot {
        let info = |r: &Live, state| RequestInfo {
            id: r.id,
            owner: OwnerTag { id: r.job.owner, label: r.job.label.clone() },
            state,
            prompt_tokens: r.job.prompt,
            cached_tokens: r.cached,
            output_tokens: r.outputs,
            num_computed: r.computed,
            blocks: r.table.clone(),
            parent: r.parent,
            choice: r.choice,
            is_beam: false,
            priority: 0,
            adapter: 0,
            swapped_blocks: r.swapped.len() as u32,
            preemptions: r.preemptions,
            submitted_us: r.submitted_us,
            first_token_us: r.first_token_us,
            last_token_us: r.last_token_us,
            finish: r.finish.clone(),
        };
        let waiting = RequestState::Waiting { reason: WaitReason::Budget, preempted: false };
        let requests = self.running.iter().map(|r| info(r, RequestState::Decoding));
        let requests = requests.chain(self.waiting.iter().map(|r| info(r, waiting)));
        let requests = requests.chain(self.done.iter().map(|r| info(r, RequestState::Finished)));
        let host = (0u32..).zip(&self.host).filter_map(|(host, place)| match *place {
            Place::Free => None,
            Place::Swapped(request) => Some(HostBlock { host, request: Some(request), hash: None }),
            Place::Cached(hash) => Some(HostBlock { host, request: None, hash: Some(hash) }),
        });
        EngineSnapshot {
            step: self.step,
            t_us: self.now_us,
            block_size: BLOCK_SIZE,
            kv_bytes_per_block: 512 << 10,
            gpu_bytes: 0,
            kv: self.totals(),
            blocks: self.blocks.clone(),
            eviction_order: self.idle.iter().copied().collect(),
            host: host.collect(),
            watermark_blocks: WATERMARK as u32,
            requests: requests.collect(),
            max_num_seqs: 64,
            max_tokens_per_step: self.budget,
            preemptions_total: self.counters.preemptions,
            recomputed_tokens_total: self.counters.recomputed,
            computed_tokens_total: self.counters.computed,
            swaps_total: self.counters.swaps,
            copied_blocks_total: self.counters.copies,
            queue: self.queue(),
            prefixes: self.prefixes(),
            ..EngineSnapshot::default()
        }
    }
}
