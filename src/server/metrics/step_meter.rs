//! Reads step records as they come: tokens and GPU time of each step, how long blocks live, idle and wait for reuse.

use super::Metrics;
use crate::ids::BlockId;
use crate::telemetry::{BlockDelta, Telemetry};
use std::collections::HashMap;

/// How far the records are read, and what is known of the blocks in use.
#[derive(Default)]
pub struct StepMeter {
    last_step: Option<u64>,
    blocks: HashMap<BlockId, Block>,
}

/// Times in microseconds since the engine started.
#[derive(Clone, Copy)]
struct Block {
    taken_us: u64,
    used_us: u64,
}

impl StepMeter {
    pub fn read(&mut self, telemetry: &Telemetry, metrics: &Metrics) {
        let (records, _) = telemetry.records_after(self.last_step);
        for record in records {
            self.last_step = Some(record.step);
            metrics.step_tokens.observe(f64::from(record.num_tokens()));
            metrics.step_gpu.observe_us(u64::from(record.gpu_us));
            record.deltas.iter().for_each(|delta| self.delta(delta, record.t0_us, metrics));
        }
    }

    fn delta(&mut self, delta: &BlockDelta, now_us: u64, metrics: &Metrics) {
        match *delta {
            BlockDelta::Alloc { block, .. } => {
                _ = self.blocks.insert(block, Block { taken_us: now_us, used_us: now_us })
            }
            BlockDelta::Share { block, .. } => {
                if let Some(known) = self.blocks.get_mut(&block) {
                    metrics.block_reuse.observe_us(now_us.saturating_sub(known.used_us));
                    known.used_us = now_us;
                }
            }
            BlockDelta::Fill { block, .. } | BlockDelta::Unref { block, .. } | BlockDelta::CacheIdle { block } => {
                if let Some(known) = self.blocks.get_mut(&block) {
                    known.used_us = now_us;
                }
            }
            BlockDelta::Evict { block } => {
                if let Some(known) = self.blocks.remove(&block) {
                    metrics.block_lifetime.observe_us(now_us.saturating_sub(known.taken_us));
                    metrics.block_idle.observe_us(now_us.saturating_sub(known.used_us));
                }
            }
            BlockDelta::Free { block } => {
                if let Some(known) = self.blocks.remove(&block) {
                    metrics.block_lifetime.observe_us(now_us.saturating_sub(known.taken_us));
                }
            }
            _ => {}
        }
    }
}
