//! The latest state, copied out for readers, and what the prefix cache can find.

use super::EngineCore;
use crate::engine::prefetch::Prefetch;
use crate::engine::record;
use crate::ids::RequestId;
use crate::scheduler::StepPlan;
use crate::telemetry::prefixes::PrefixChange;
use crate::telemetry::{EngineSnapshot, RequestInfo, WaitReason};
use std::collections::HashMap;
use std::time::Instant;

/// Waiting requests that a snapshot shows.
const MAX_WAITING_SHOWN: usize = 512;

impl EngineCore {
    /// Replaces the snapshot by the state as it is now.
    pub(in crate::engine) fn publish_snapshot(&mut self) {
        self.published = Some(Instant::now());
        let (config, totals) = (self.scheduler.config(), self.scheduler.totals());
        let requests = self.request_infos();
        let snapshot = EngineSnapshot {
            step: self.step,
            t_us: self.now_us(),
            block_size: self.scheduler.kv().block_size(),
            kv_bytes_per_block: self.model.kv_bytes_per_block,
            gpu_bytes: self.executor.as_ref().map_or(0, |executor| executor.gpu_bytes()),
            group_windows: self.scheduler.kv().config().groups.windows().collect(),
            kv: self.kv_totals(),
            blocks: record::blocks(self.scheduler.kv()),
            eviction_order: self.scheduler.kv().eviction_order().collect(),
            host: record::host(self.scheduler.kv()),
            watermark_blocks: config.watermark_blocks,
            queue: record::queue(&self.scheduler, self.binding, &requests),
            prefixes: record::prefixes(self.scheduler.kv(), self.prefetch.as_ref().map(Prefetch::tier)),
            requests,
            max_num_seqs: config.max_num_seqs,
            max_tokens_per_step: config.max_tokens_per_step,
            victim_policy: self.options.victim_policy,
            preemptions_total: totals.preemptions,
            swaps_total: totals.swaps,
            recomputed_tokens_total: totals.recomputed_tokens,
            computed_tokens_total: totals.computed_tokens,
            copied_blocks_total: totals.copied_blocks,
        };
        self.shared.telemetry.publish(snapshot);
    }

    /// Says what the step is to do, in case that it does not end.
    pub(super) fn enter_step(&self, plan: &StepPlan, t0_us: u64) {
        self.shared.telemetry.in_flight().enter(|step| {
            (step.step, step.t0_us, step.budget) = (plan.step, t0_us, plan.budget);
            step.rows.clear();
            step.rows.extend(plan.rows.iter().map(record::row));
            step.admitted.clear();
            step.admitted.extend(plan.admitted.iter().map(|admission| admission.request));
            step.preempted.clear();
            step.preempted.extend(plan.preempted.iter().map(|preemption| preemption.victim));
            step.num_copies = plan.copies.len() as u32;
            (step.num_swapped_out, step.num_swapped_in) = (plan.swap_out.len() as u32, plan.swap_in.len() as u32);
            (step.num_running, step.num_waiting) = (plan.num_running, plan.num_waiting);
        });
    }

    /// Tells what the prefix cache can find now and could not before, and the other way round, to whoever follows it: at
    /// first all that it can find.
    pub(in crate::engine) fn tell_prefixes(&mut self) {
        let feed = self.shared.telemetry.prefix_feed();
        let is_kept = self.scheduler.kv().keeps_changes();
        match feed.num_told() {
            None if is_kept => self.scheduler.keep_prefix_changes(false),
            None => {}
            Some(num_told) if num_told == 0 || !is_kept => {
                self.scheduler.keep_prefix_changes(true);
                let all = self.scheduler.kv().findable().into_iter().map(record::prefix_change);
                feed.tell(std::iter::once(PrefixChange::Cleared).chain(all).collect());
            }
            Some(_) => {
                let changes = self.scheduler.take_prefix_changes();
                feed.tell(changes.into_iter().map(record::prefix_change).collect());
            }
        }
    }

    /// Running in batch order, the first that wait in queue order, the last ended.
    fn request_infos(&self) -> Vec<RequestInfo> {
        let mut infos = Vec::new();
        for seq in self.scheduler.running() {
            infos.extend(self.run_by(seq.gang().unwrap_or(seq.id())).map(|run| run.info(seq, None)));
        }
        let told: HashMap<RequestId, WaitReason> = self.reasons.iter().copied().collect();
        for (i, seq) in self.scheduler.waiting().take(MAX_WAITING_SHOWN).enumerate() {
            let told = told.get(&seq.id()).copied();
            let reason = told.unwrap_or(WaitReason::Behind { position: i as u32 });
            let beams = self.scheduler.gang_members(seq.id()).filter(|beam| beam.is_follower());
            let swapped = std::iter::once(seq).chain(beams).filter_map(|seq| seq.swapped());
            let swapped_blocks = swapped.map(|swapped| self.scheduler.kv().num_in_host(swapped)).sum();
            let info = self.run_by(seq.gang().unwrap_or(seq.id())).map(|run| run.info(seq, Some(reason)));
            infos.extend(info.map(|info| RequestInfo { swapped_blocks, ..info }));
        }
        infos.extend(self.finished.iter().cloned());
        infos
    }
}
