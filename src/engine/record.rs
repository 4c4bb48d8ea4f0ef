//! Decisions and cache changes in the words of telemetry.

use super::disk::DiskTier;
use crate::kv::{self, BlockEvent, KvCache, PrefixChange};
use crate::protocol::OwnerTag;
use crate::scheduler::{self, Scheduler, StepPlan};
use crate::telemetry::prefixes;
use crate::telemetry::{
    BlockDelta, BlockInfo, BlockState, ClientShare, HostBlock, KvTotals, PreemptMode, Preemption, PrefixInfo,
    QueueInfo, QueuePolicy, RequestInfo, RowKind, SeqStep, Tier, VictimPolicy, WaitReason,
};

/// Clients and prefixes that a snapshot shows.
const MAX_CLIENTS: usize = 64;
const MAX_PREFIXES: usize = 64;

pub fn delta(event: BlockEvent) -> BlockDelta {
    match event {
        BlockEvent::Alloc { block, request, logical } => BlockDelta::Alloc { block, request, logical },
        BlockEvent::Fill { block, filled } => BlockDelta::Fill { block, filled },
        BlockEvent::Share { block, request, logical } => BlockDelta::Share { block, request, logical },
        BlockEvent::Unref { block, request } => BlockDelta::Unref { block, request },
        BlockEvent::CacheIdle { block } => BlockDelta::CacheIdle { block },
        BlockEvent::Evict { block } => BlockDelta::Evict { block },
        BlockEvent::Free { block } => BlockDelta::Free { block },
        BlockEvent::Publish { block, hash } => BlockDelta::Publish { block, hash },
        BlockEvent::SwapOut { block, host, request } => BlockDelta::SwapOut { block, host: host.0, request },
        BlockEvent::SwapIn { host, block, request } => BlockDelta::SwapIn { host: host.0, block, request },
        BlockEvent::HostFree { host } => BlockDelta::HostFree { host: host.0 },
        BlockEvent::Copy { from, to, request } => BlockDelta::Copy { from, to, request },
        BlockEvent::Pin { block } => BlockDelta::Pin { block },
        BlockEvent::Unpin { block } => BlockDelta::Unpin { block },
    }
}

pub fn prefix_change(change: PrefixChange) -> prefixes::PrefixChange {
    match change {
        PrefixChange::Stored { hash, parent, key, tokens } => {
            prefixes::PrefixChange::Stored { hash, parent, tokens, cache_salt: key.salt, adapter: key.adapter }
        }
        PrefixChange::Removed { hash } => prefixes::PrefixChange::Removed { hash },
    }
}

/// The changes that a lost cache amounts to: every holder lets go, every block is free.
pub fn loss_of<'a>(kv: &KvCache, tables: impl Iterator<Item = &'a kv::BlockTable>) -> Vec<BlockDelta> {
    let mut deltas = Vec::new();
    for table in tables {
        deltas.extend(table.held().map(|block| BlockDelta::Unref { block, request: table.owner() }));
    }
    for (id, block) in kv.blocks().enumerate().skip(1) {
        if block.state != kv::BlockState::Free {
            deltas.push(BlockDelta::Free { block: crate::ids::BlockId(id as u32) });
        }
    }
    deltas.extend(kv.host_views().map(|view| BlockDelta::HostFree { host: view.host.0 }));
    deltas
}

pub fn totals(kv: &KvCache) -> KvTotals {
    let counts = kv.counts();
    KvTotals {
        total: counts.total,
        used: counts.used,
        cached_idle: counts.cached_idle,
        free: counts.free,
        shared: counts.shared,
        saved: counts.saved,
        evicted_this_step: counts.evicted_this_step,
        pinned: counts.pinned,
        query_tokens: counts.query_tokens,
        hit_tokens: counts.hit_tokens,
        host_hit_tokens: counts.host_hit_tokens - counts.disk_hit_tokens,
        disk_hit_tokens: counts.disk_hit_tokens,
        host_total: counts.host.total,
        host_swapped: counts.host.swapped,
        host_cached: counts.host.cached,
        partial_hit_tokens: counts.partial_hit_tokens,
        ..KvTotals::default()
    }
}

/// Taken places of host memory.
pub fn host(kv: &KvCache) -> Vec<HostBlock> {
    let block = |view: kv::HostView| HostBlock {
        host: view.host.0,
        request: match view.state {
            kv::HostState::Held(owner) | kv::HostState::Writing(Some(owner)) => Some(owner),
            kv::HostState::Free | kv::HostState::Cached | kv::HostState::Writing(None) => None,
        },
        hash: view.hash,
    };
    kv.host_views().map(block).collect()
}

pub fn blocks(kv: &KvCache) -> Vec<BlockInfo> {
    let info = |view: kv::BlockView| BlockInfo {
        state: match view.state {
            kv::BlockState::Free => BlockState::Free,
            kv::BlockState::CachedIdle => BlockState::CachedIdle,
            kv::BlockState::Null => BlockState::Null,
            kv::BlockState::Reserved | kv::BlockState::Active => BlockState::Active,
        },
        refs: view.refs,
        filled: view.filled,
        hash: view.hash,
        pinned: view.is_pinned,
        last_step: view.last_step,
    };
    kv.blocks().map(info).collect()
}

/// The rows of a plan; what they sampled is filled in later.
pub fn rows(plan: &StepPlan) -> Vec<SeqStep> {
    plan.rows.iter().map(row).collect()
}

/// A row of a plan, which has sampled nothing yet.
pub fn row(row: &scheduler::PlanRow) -> SeqStep {
    SeqStep {
        request: row.request,
        slot: row.slot,
        kind: match row.kind {
            scheduler::RowKind::Prefill { cached } => RowKind::Prefill { cached },
            scheduler::RowKind::Decode => RowKind::Decode,
            scheduler::RowKind::Recompute { cached } => RowKind::Recompute { cached },
        },
        from: row.from,
        num_tokens: row.num_tokens,
        sampled: None,
        forced: Vec::new(),
    }
}

pub fn preemption(p: &scheduler::Preemption) -> Preemption {
    Preemption {
        victim: p.victim,
        beneficiary: p.beneficiary,
        freed_blocks: p.freed_blocks,
        lost_tokens: p.lost_tokens,
        mode: match p.mode {
            scheduler::PreemptMode::Recompute => PreemptMode::Recompute,
            scheduler::PreemptMode::Swap => PreemptMode::Swap,
        },
        policy: match p.policy {
            scheduler::VictimPolicy::LastIn => VictimPolicy::LastIn,
            scheduler::VictimPolicy::LeastComputed => VictimPolicy::LeastComputed,
            scheduler::VictimPolicy::Priority => VictimPolicy::Priority,
        },
        scores: p.scores.clone(),
    }
}

pub fn victim_policy(policy: VictimPolicy) -> scheduler::VictimPolicy {
    match policy {
        VictimPolicy::LastIn => scheduler::VictimPolicy::LastIn,
        VictimPolicy::LeastComputed => scheduler::VictimPolicy::LeastComputed,
        VictimPolicy::Priority => scheduler::VictimPolicy::Priority,
    }
}

/// The queue, with the clients that have live requests: those who are next under the fair policy first.
pub fn queue(scheduler: &Scheduler, binding: Option<WaitReason>, requests: &[RequestInfo]) -> QueueInfo {
    let mut live: Vec<_> = scheduler.clients().filter(|view| view.waiting + view.running > 0).collect();
    live.sort_unstable_by_key(|view| (view.counter, view.client));
    let owner = |client: u64| {
        let shown = requests.iter().find(|request| request.owner.id == client);
        shown.map_or_else(|| OwnerTag { id: client, label: String::new() }, |request| request.owner.clone())
    };
    let share = |view: &scheduler::ClientView| ClientShare {
        owner: owner(view.client),
        served_tokens: view.served_tokens,
        counter: view.counter,
        waiting: view.waiting,
        running: view.running,
    };
    QueueInfo {
        policy: match scheduler.config().queue_policy {
            scheduler::QueuePolicy::Fcfs => QueuePolicy::Fcfs,
            scheduler::QueuePolicy::Priority => QueuePolicy::Priority,
            scheduler::QueuePolicy::LongestPrefix => QueuePolicy::LongestPrefix,
            scheduler::QueuePolicy::Fair => QueuePolicy::Fair,
        },
        binding: binding.filter(|_| scheduler.num_waiting() > 0),
        clients: live.into_iter().take(MAX_CLIENTS).map(share).collect(),
    }
}

/// The prefixes that some tier of the cache has, pinned first, then by hits.
pub fn prefixes(kv: &KvCache, disk: Option<&DiskTier>) -> Vec<PrefixInfo> {
    let info = |view: kv::PrefixView| PrefixInfo {
        id: view.id,
        name: view.name,
        tokens: view.blocks * kv.block_size(),
        blocks: view.blocks,
        hits: view.hits,
        hit_tokens: view.hit_tokens,
        host_hit_tokens: view.host_hit_tokens - view.disk_hit_tokens,
        disk_hit_tokens: view.disk_hit_tokens,
        last_hit_step: view.last_hit_step,
        pinned: view.is_pinned,
        tier: match view.place {
            kv::PrefixPlace::Pool => Tier::Gpu,
            kv::PrefixPlace::Host => Tier::Host,
            kv::PrefixPlace::Outside => Tier::Disk,
        },
        cache_salt: view.key.salt,
        adapter: view.key.adapter,
        head: view.head,
    };
    let is_on_disk = |id: &kv::ContentId| disk.is_some_and(|disk| disk.has(id));
    kv.prefixes(MAX_PREFIXES, &is_on_disk).into_iter().map(info).collect()
}

/// The policy that settings name, as the scheduler knows it.
pub fn queue_policy(policy: QueuePolicy) -> scheduler::QueuePolicy {
    match policy {
        QueuePolicy::Fcfs => scheduler::QueuePolicy::Fcfs,
        QueuePolicy::Priority => scheduler::QueuePolicy::Priority,
        QueuePolicy::LongestPrefix => scheduler::QueuePolicy::LongestPrefix,
        QueuePolicy::Fair => scheduler::QueuePolicy::Fair,
    }
}

pub fn wait_reason(reason: scheduler::WaitReason) -> WaitReason {
    match reason {
        scheduler::WaitReason::Behind { position } => WaitReason::Behind { position },
        scheduler::WaitReason::Blocks { needed, available } => WaitReason::Blocks { needed, available },
        scheduler::WaitReason::Slots { max_num_seqs } => WaitReason::Slots { max_num_seqs },
        scheduler::WaitReason::Budget => WaitReason::Budget,
        scheduler::WaitReason::Gang { needed, available } => WaitReason::Gang { needed, available },
        scheduler::WaitReason::Preemption => WaitReason::Preemption,
        scheduler::WaitReason::Prefix { leader } => WaitReason::Prefix { leader },
        scheduler::WaitReason::Share { ahead } => WaitReason::Share { ahead },
    }
}
