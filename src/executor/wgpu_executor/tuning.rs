//! Measuring a model's products and attention when it is first loaded on an adapter, and using what was found.
//!
//! Guarantees: at most [`FIRST_START`] of a load goes into measuring; what was not reached is measured at later loads. What
//! was found is used only if a short prefill and decode with it take at most 1 % longer than without. A fault while
//! measuring costs a warning, not the load.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::forward::Forward;
use super::weights::Progress;
use super::{ExecutorConfig, WgpuExecutor};
use crate::batch::{RowSampling, StepBatch};
use crate::executor::{ExecError, Executor, LoadError, LoadProgress};
use crate::gpu::Gpu;
use crate::kernels::attention::AttentionCut;
use crate::kernels::attention_work::WorkLimits;
use crate::kernels::feed::Feed;
use crate::kernels::tile::ProductKey;
use crate::kernels::tune::table::{Adapter, Entry, Table, is_shipped};
use crate::kernels::tune::{self, Outcome, TuneKey};
use crate::kernels::{Choices, DeviceClass};
use crate::model::Model;
use crate::protocol::SamplingParams;

/// Whether kernels are measured at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TuneMode {
    /// What was not measured on this adapter yet, unless its class comes with choices.
    Auto,
    /// Nothing is measured, and nothing that was measured is used.
    Never,
    /// Everything, whatever was found before.
    Again,
}

/// How a load tunes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    pub mode: TuneMode,
    /// Holds a table for each adapter and driver.
    pub dir: PathBuf,
}

/// What a load spends on measuring unless it was asked for.
pub const FIRST_START: Duration = Duration::from_secs(2);
/// The same when it was.
const AGAIN: Duration = Duration::from_secs(60);
/// Steps of the short decode.
const DECODE_STEPS: u32 = 8;
const PREFILL_TOKENS: u32 = 64;
/// Of several runs the shortest counts: other work on the machine only ever adds.
const RUNS: usize = 3;
/// What was found may take this much of the time without it.
const MOST_TIME: f64 = 1.0 / 0.99;

impl WgpuExecutor {
    /// As [`WgpuExecutor::with_streamed`], with products computed in the ways that are fastest on this adapter, as far as
    /// that is known or can be found out soon.
    pub fn tuned(
        gpu: Gpu,
        model: &Model,
        cfg: ExecutorConfig,
        num_streamed: u32,
        tuning: &Tuning,
        progress: Progress<'_>,
    ) -> Result<WgpuExecutor, LoadError> {
        let adapter = Adapter::of(gpu.caps());
        let has_shipped = is_shipped(DeviceClass::of(gpu.caps()));
        let (table, warning) = match tuning.mode {
            TuneMode::Auto => Table::load(&tuning.dir, adapter),
            TuneMode::Never | TuneMode::Again => (Table::empty(adapter), None),
        };
        warning.iter().for_each(|warning| tracing::warn!("{warning}"));
        let mut executor = WgpuExecutor::with_choices(gpu, model, cfg, num_streamed, table.choices(), progress)?;
        let budget = match tuning.mode {
            TuneMode::Auto if has_shipped => return Ok(executor),
            TuneMode::Auto => FIRST_START,
            TuneMode::Never => return Ok(executor),
            TuneMode::Again => AGAIN,
        };
        let mut keys = executor.tune_keys();
        keys.retain(|key| !table.products.contains_key(&key.to_string()));
        if keys.is_empty() {
            return Ok(executor);
        }
        if !progress(LoadProgress { phase: "Measuring kernels", done: 0, total: 1 }) {
            return Err(LoadError::Cancelled);
        }
        match executor.tune(&keys, budget, table) {
            Ok(table) => {
                if let Err(fault) = table.save(&tuning.dir) {
                    tracing::warn!(
                        "cannot keep what was measured: {fault}: {}",
                        table.adapter.path(&tuning.dir).display()
                    );
                }
            }
            Err(fault) => tracing::warn!("kernels were not measured: {fault}"),
        }
        executor.gpu.check()?;
        Ok(executor)
    }

    /// The products of the model, those of few tokens first.
    pub fn products(&self) -> Vec<ProductKey> {
        self.forward.choices.asked()
    }

    /// All that has ways: the products of few tokens, attention, then other products.
    pub fn tune_keys(&self) -> Vec<TuneKey> {
        let products = self.products().into_iter();
        let (few, many): (Vec<ProductKey>, Vec<ProductKey>) = products.partition(|key| key.tokens == 1);
        let attention = self.forward.choices.asked_attention().into_iter().map(TuneKey::Attention);
        let few = few.into_iter().map(TuneKey::Product);
        few.chain(attention).chain(many.into_iter().map(TuneKey::Product)).collect()
    }

    /// Measures, and takes over what holds for whole steps as well.
    fn tune(&mut self, keys: &[TuneKey], budget: Duration, mut table: Table) -> Result<Table, LoadError> {
        let mut found: Vec<Outcome> = Vec::new();
        tune::tune(&self.gpu, keys, budget, &mut |outcome| found.push(outcome))?;
        for outcome in &found {
            for (way, ban) in outcome.candidates.iter().filter_map(|c| Some((&c.way, c.ban.as_ref()?))) {
                tracing::warn!("the kernel {way} of {} is not used: {ban}", outcome.key);
            }
        }
        let before = table.choices();
        table.products.extend(found.iter().map(|outcome| (outcome.key.to_string(), Entry::of(outcome))));
        if found.iter().all(Outcome::is_prior) {
            return Ok(table);
        }
        let usual = self.pace()?;
        self.rebind(table.choices())?;
        let tuned = self.pace()?;
        tracing::info!("a short run takes {:.1} ms with measured kernels, {:.1} ms without", 1e3 * tuned, 1e3 * usual);
        if !keeps(usual, tuned) {
            for outcome in &mut found {
                outcome.candidates.first().iter().for_each(|prior| outcome.chosen.clone_from(&prior.way));
            }
            table.products.extend(found.iter().map(|outcome| (outcome.key.to_string(), Entry::of(outcome))));
            self.rebind(before)?;
        }
        Ok(table)
    }

    /// Binds all kernels anew, with other choices.
    fn rebind(&mut self, choices: Choices) -> Result<(), LoadError> {
        let kv = self.forward.kv.clone();
        let sizes = (&self.spec, &self.groups);
        let weights = (&self.weights, &self.loras);
        self.forward = Forward::new(&self.gpu, sizes, &self.cfg, weights, &self.meta, (choices, Some(kv)))?;
        self.feed = Feed::new(&self.gpu, &self.meta.whole(), &self.forward.sampled.whole())?;
        let AttentionCut { tokens_per_workgroup, parts } = self.forward.attention_cut;
        self.work_limits = WorkLimits { tokens_per_workgroup, parts, ..self.work_limits };
        self.warm_up()?;
        Ok(())
    }

    /// Seconds of a short prefill and a short decode. What the pool holds is lost: nothing is in it at load.
    fn pace(&mut self) -> Result<f64, LoadError> {
        let room = (self.cfg.num_blocks - 1) * self.cfg.block_size;
        let room = room.min(self.cfg.max_model_len).saturating_sub(DECODE_STEPS);
        let prompt = PREFILL_TOKENS.min(room).min(self.cfg.max_tokens_per_step).max(1);
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            let started = Instant::now();
            self.step(0, prompt).map_err(refused)?;
            for position in prompt..prompt + DECODE_STEPS {
                self.step(position, 1).map_err(refused)?;
            }
            best = best.min(started.elapsed().as_secs_f64());
        }
        Ok(best)
    }

    /// One row of so many tokens from a position on, its blocks the first of the pool.
    fn step(&mut self, first: u32, num_tokens: u32) -> Result<(), ExecError> {
        let (block_size, num_groups) = (self.cfg.block_size, self.groups.windows.len() as u32);
        let positions = first..first + num_tokens;
        let num_blocks = (first + num_tokens).div_ceil(block_size);
        let most = (self.cfg.num_blocks - 1).max(1);
        let block = |b: u32, group: u32| 1 + (b * num_groups + group) % most;
        let slot = |position: u32, group| block(position / block_size, group) * block_size + position % block_size;
        let batch = StepBatch {
            block_size,
            num_groups,
            input_ids: positions.clone().map(|p| p % self.spec.vocab_size).collect(),
            positions: positions.clone().collect(),
            kv_slots: positions.clone().flat_map(|p| (0..num_groups).map(move |group| slot(p, group))).collect(),
            row_of_token: vec![0; num_tokens as usize],
            row_start: vec![0, num_tokens],
            slot_of_row: vec![0],
            block_tables: (0..num_groups).flat_map(|group| (0..num_blocks).map(move |b| block(b, group))).collect(),
            block_table_start: (0..=num_groups).map(|group| group * num_blocks).collect(),
            logit_tokens: vec![num_tokens - 1],
            sampling: vec![RowSampling {
                position: first + num_tokens,
                ..RowSampling::new(&SamplingParams::greedy(), 0)
            }],
            penalty_start: vec![0, 0],
            bias_start: vec![0, 0],
            ..StepBatch::default()
        };
        let handle = self.launch(&batch)?;
        self.wait(handle).map(|_| ())
    }
}

fn refused(fault: ExecError) -> LoadError {
    LoadError::Unsupported(fault.to_string())
}

/// Whether a whole run is not slower with what was found.
fn keeps(usual: f64, tuned: f64) -> bool {
    tuned <= usual * MOST_TIME
}

#[cfg(test)]
mod tests {
    use super::keeps;

    #[test]
    fn what_was_found_is_kept_unless_whole_steps_are_slower() {
        assert!(keeps(1.0, 0.9) && keeps(1.0, 1.0) && keeps(1.0, 1.005));
        assert!(!keeps(1.0, 1.02));
    }
}
