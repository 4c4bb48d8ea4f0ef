//! Queue, preemptions and cached prefixes in words.
//!
//! Guarantees: what is said is what the engine told; where it told no number, none is made up.

use crate::app::format;
use crate::ids::RequestId;
use crate::telemetry::{
    KvTotals, PreemptMode, Preemption, PrefixInfo, QueuePolicy, StepRecord, Tier, VictimPolicy, WaitReason,
};

/// The policy's name and what it does.
pub fn policy_words(policy: QueuePolicy) -> (&'static str, &'static str) {
    match policy {
        QueuePolicy::Fcfs => ("First come, first served", "Requests join in order of arrival"),
        QueuePolicy::Priority => ("Priority", "The lowest priority number joins first; waiting long counts too"),
        QueuePolicy::LongestPrefix => {
            ("Longest prefix", "The request that finds most of its prompt cached joins first")
        }
        QueuePolicy::Fair => {
            ("Fair", "The client that was served the fewest tokens goes first; within a client, arrival")
        }
    }
}

/// Who gives way when blocks are short.
pub fn victim_words(policy: VictimPolicy) -> (&'static str, &'static str) {
    match policy {
        VictimPolicy::LastIn => ("Last in", "The request that joined last gives way"),
        VictimPolicy::LeastComputed => ("Least computed", "The request with the fewest computed tokens gives way"),
        VictimPolicy::Priority => {
            ("Lowest priority", "The request of lowest priority gives way, the last in among equals")
        }
    }
}

/// What the candidates of a preemption were ranked by.
pub fn score_words(policy: VictimPolicy) -> &'static str {
    match policy {
        VictimPolicy::LastIn => "order of joining",
        VictimPolicy::LeastComputed => "least computed first",
        VictimPolicy::Priority => "priority, then order of joining",
    }
}

/// The binding constraint of a step: who is held up by what, with the numbers that the record has.
pub fn binding_words(record: &StepRecord, watermark: u32, name: impl Fn(RequestId) -> String) -> Option<String> {
    let (id, reason) = record.waiting.iter().find(|(_, r)| !matches!(r, WaitReason::Behind { .. }))?;
    let who = name(*id);
    Some(match reason {
        WaitReason::Blocks { needed, available } => {
            let (needed, available) = (u64::from(*needed), u64::from(*available));
            let blocks = format::counted(needed, "block");
            format!(
                "{who} needs {blocks}, {} can be had. {}",
                format::count(available),
                pool_words(&record.kv, watermark)
            )
        }
        WaitReason::Slots { max_num_seqs } => {
            format!("{who} waits for a place: all {max_num_seqs} of the batch are taken")
        }
        WaitReason::Budget => {
            format!("{who} waits for tokens: the step's budget of {} is used up", format::count(record.budget.into()))
        }
        WaitReason::Preemption => format!("{who} waits: a preemption happened in this step, nothing joins beside it"),
        WaitReason::Prefix { leader } => {
            format!("{who} waits one step: {} computes the same beginning now, then both share it", name(*leader))
        }
        WaitReason::Share { ahead } => {
            format!("{who} waits: the client of {} was served fewer tokens and goes first", name(*ahead))
        }
        WaitReason::Gang { needed, available } => {
            format!("{who} waits: its {needed} beams join together, and {available} places are there")
        }
        WaitReason::Behind { position } => format!("{who} is number {} in the queue", position + 1),
    })
}

/// "After the step 3 are free and 7 cached; the watermark keeps 1 free for what runs".
fn pool_words(kv: &KvTotals, watermark: u32) -> String {
    let (free, cached) = (format::count(kv.free.into()), format::count(kv.cached_idle.into()));
    let mut out = format!("After the step {free} are free and {cached} cached");
    if kv.pinned > 0 {
        out += &format!(", {} pinned", format::count(kv.pinned.into()));
    }
    if watermark > 0 {
        out += &format!("; the watermark keeps {} free for what runs", format::count(watermark.into()));
    }
    out
}

/// How a preempted request gets its K and V back, with what it costs.
pub fn preempt_mode_words(p: &Preemption) -> String {
    let freed = format::counted(p.freed_blocks.into(), "block");
    match p.mode {
        PreemptMode::Swap => format!("{freed} freed, their content waits in host memory"),
        PreemptMode::Recompute => {
            format!("{freed} freed, {} to recompute", format::counted(p.lost_tokens.into(), "token"))
        }
    }
}

/// Where a prefix is kept.
pub fn tier_words(tier: Tier) -> (&'static str, &'static str) {
    match tier {
        Tier::Gpu => ("GPU", "Its blocks lie in the pool"),
        Tier::Host => ("host memory", "Its blocks lie in host memory and are copied back on a hit"),
        Tier::Disk => ("disk", "Its blocks lie on disk and are read back on a hit"),
    }
}

/// "96 tokens · 6 blocks · GPU · 12 hits spared 1,152 tokens · last 3 steps ago".
pub fn prefix_facts(prefix: &PrefixInfo, step: u64) -> String {
    let mut parts = vec![
        format::counted(prefix.tokens.into(), "token"),
        format::counted(prefix.blocks.into(), "block"),
        tier_words(prefix.tier).0.to_owned(),
    ];
    if prefix.hits > 0 {
        let hits = format::counted(prefix.hits, "hit");
        let (host, disk) = (prefix.host_hit_tokens, prefix.disk_hit_tokens);
        let elsewhere = [(host, Tier::Host), (disk, Tier::Disk)].into_iter().filter(|(tokens, _)| *tokens > 0);
        let elsewhere: Vec<String> =
            elsewhere.map(|(tokens, tier)| format!("{} from {}", format::count(tokens), tier_words(tier).0)).collect();
        let elsewhere = if elsewhere.is_empty() { String::new() } else { format!(" ({})", elsewhere.join(", ")) };
        parts.push(format!("{hits} spared {}{elsewhere}", format::counted(prefix.hit_tokens, "token")));
        parts.push(format!("last {}", super::words::steps_ago(step.saturating_sub(prefix.last_hit_step))));
    } else {
        parts.push("no hit yet".to_owned());
    }
    parts.join(" · ")
}

/// Prompt tokens by where they came from: the cache's tiers, or computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HitSplit {
    /// In full blocks on the GPU.
    pub full: u64,
    /// In a block shared in part, which is copied before it is written.
    pub partial: u64,
    pub host: u64,
    pub disk: u64,
    pub computed: u64,
}

impl HitSplit {
    pub fn of(kv: &KvTotals) -> HitSplit {
        let elsewhere = kv.partial_hit_tokens + kv.host_hit_tokens + kv.disk_hit_tokens;
        HitSplit {
            full: kv.hit_tokens.saturating_sub(elsewhere),
            partial: kv.partial_hit_tokens,
            host: kv.host_hit_tokens,
            disk: kv.disk_hit_tokens,
            computed: kv.query_tokens.saturating_sub(kv.hit_tokens),
        }
    }

    pub fn total(&self) -> u64 {
        self.full + self.partial + self.host + self.disk + self.computed
    }

    /// Each part with its name, the computed ones last.
    pub fn parts(&self) -> [(&'static str, u64); 5] {
        [
            ("GPU", self.full),
            ("shared in part", self.partial),
            ("host memory", self.host),
            ("disk", self.disk),
            ("computed", self.computed),
        ]
    }

    /// "Of 1,200 prompt tokens: GPU 800 (67 %), host memory 100 (8 %), computed 300 (25 %)".
    pub fn words(&self) -> String {
        let total = self.total();
        if total == 0 {
            return "No prompt was looked up yet".to_owned();
        }
        let part = |(name, n): (&str, u64)| format!("{name} {} ({})", format::count(n), format::percent(n, total));
        let parts: Vec<String> = self.parts().into_iter().filter(|(_, n)| *n > 0).map(part).collect();
        format!("Of {}: {}", format::counted(total, "prompt token"), parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(id: RequestId) -> String {
        format!("R{id}")
    }

    #[test]
    fn the_binding_constraint_comes_with_its_numbers() {
        let kv = KvTotals { free: 3, cached_idle: 7, ..KvTotals::default() };
        let record = |reason| StepRecord {
            budget: 256,
            kv,
            waiting: vec![(RequestId(1), WaitReason::Behind { position: 0 }), (RequestId(2), reason)],
            ..StepRecord::default()
        };
        let words = |reason, watermark| binding_words(&record(reason), watermark, name).unwrap();
        assert_eq!(
            words(WaitReason::Blocks { needed: 12, available: 7 }, 3),
            "R2 needs 12 blocks, 7 can be had. After the step 3 are free and 7 cached; the watermark keeps 3 free for \
             what runs"
        );
        assert_eq!(
            words(WaitReason::Blocks { needed: 1, available: 0 }, 0),
            "R2 needs 1 block, 0 can be had. After the step 3 are free and 7 cached"
        );
        assert_eq!(words(WaitReason::Budget, 0), "R2 waits for tokens: the step's budget of 256 is used up");
        assert_eq!(
            words(WaitReason::Share { ahead: RequestId(9) }, 0),
            "R2 waits: the client of R9 was served fewer tokens and goes first"
        );
        assert_eq!(binding_words(&StepRecord::default(), 0, name), None);
    }

    #[test]
    fn hits_split_by_tier_and_sum_to_what_was_looked_up() {
        let kv = KvTotals {
            query_tokens: 1_000,
            hit_tokens: 700,
            partial_hit_tokens: 50,
            host_hit_tokens: 100,
            disk_hit_tokens: 0,
            ..KvTotals::default()
        };
        let split = HitSplit::of(&kv);
        assert_eq!((split.full, split.computed, split.total()), (550, 300, 1_000));
        assert_eq!(
            split.words(),
            "Of 1,000 prompt tokens: GPU 550 (55 %), shared in part 50 (5 %), host memory 100 (10 %), computed 300 (30 %)"
        );
        assert_eq!(HitSplit::default().words(), "No prompt was looked up yet");
    }

    #[test]
    fn a_prefix_says_what_it_is_worth() {
        let mut prefix = PrefixInfo {
            id: 1,
            name: None,
            tokens: 96,
            blocks: 6,
            hits: 12,
            hit_tokens: 1_152,
            host_hit_tokens: 0,
            disk_hit_tokens: 0,
            last_hit_step: 7,
            pinned: false,
            tier: Tier::Host,
            cache_salt: 0,
            adapter: 0,
            head: Vec::new(),
        };
        let facts = "96 tokens · 6 blocks · host memory · 12 hits spared 1,152 tokens · last 3 steps ago";
        assert_eq!(prefix_facts(&prefix, 10), facts);
        (prefix.host_hit_tokens, prefix.disk_hit_tokens) = (1_056, 96);
        let facts = facts.replace("tokens · last", "tokens (1,056 from host memory, 96 from disk) · last");
        assert_eq!(prefix_facts(&prefix, 10), facts);
        prefix.hits = 0;
        assert_eq!(prefix_facts(&prefix, 10), "96 tokens · 6 blocks · host memory · no hit yet");
    }
}
