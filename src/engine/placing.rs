//! Builds the executor as planned, and with fewer layers on the GPU when its memory runs out.
//!
//! Guarantees: layers go to host memory only when that was asked for or nothing else helps, with a warning; the plan that
//! is returned is the one that was built.

use super::loader::{LoadFailure, OnProgress, Progress, open_gpu};
use super::memory_plan::{self, EnginePlan, Machine};
use super::options::{EngineOptions, StepLoop};
use crate::executor::wgpu_executor::{self, ExecutorConfig, StepsAhead, TuneMode, Tuning, WgpuExecutor};
use crate::executor::{Executor, LoadError};
use crate::gpu::{Gpu, GpuError};
use crate::model::Model;

/// What an executor is built with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Recipe {
    pub config: ExecutorConfig,
    pub num_host_blocks: u32,
    pub num_streamed: u32,
    step_loop: StepLoop,
    pub tuning: Tuning,
}

impl Recipe {
    fn of(options: &EngineOptions, plan: &EnginePlan) -> Recipe {
        // Without a folder to keep it in, it would be measured at each start.
        let has_dir = !options.cache_dir.as_os_str().is_empty();
        let mode = if has_dir { options.tune } else { TuneMode::Never };
        Recipe {
            config: memory_plan::executor_config(options, plan.memory.num_blocks, plan.max_model_len),
            num_host_blocks: plan.num_host_blocks,
            num_streamed: plan.num_streamed,
            step_loop: options.step_loop,
            tuning: Tuning { mode, dir: options.cache_dir.join("tuning") },
        }
    }

    /// For a device that was lost: what was measured holds.
    pub fn again(mut self) -> Recipe {
        if self.tuning.mode == TuneMode::Again {
            self.tuning.mode = TuneMode::Auto;
        }
        self
    }

    pub fn build(&self, gpu: Gpu, model: &Model, on_progress: OnProgress<'_>) -> Result<Box<dyn Executor>, LoadError> {
        let progress = &mut |progress: crate::executor::LoadProgress| {
            on_progress(Progress { phase: progress.phase, done: progress.done, total: progress.total })
        };
        let mut executor = WgpuExecutor::tuned(gpu, model, self.config, self.num_streamed, &self.tuning, progress)?;
        let ahead = match self.step_loop {
            StepLoop::Auto if !executor.gpu().caps().is_cpu => StepsAhead::WhenItPays,
            StepLoop::Auto | StepLoop::Sync => StepsAhead::Never,
            StepLoop::Ahead => StepsAhead::Always,
        };
        executor.set_preparing(ahead != StepsAhead::Never);
        executor.set_steps_ahead(ahead);
        Ok(Box::new(executor.with_host_blocks(self.num_host_blocks)))
    }
}

/// An executor with its plan, on this adapter.
pub(super) fn place(
    mut gpu: Gpu,
    model: &Model,
    options: &EngineOptions,
    on_progress: OnProgress<'_>,
) -> Result<(EnginePlan, Recipe, Box<dyn Executor>), LoadFailure> {
    let machine = Machine::with_adapter(gpu.caps().is_cpu, gpu.caps().max_binding_bytes);
    let mut options = options.clone();
    let may_stream = options.cpu_offload_bytes.is_none() && !machine.is_cpu;
    loop {
        let plan = memory_plan::plan(model, &options, machine)?;
        let recipe = Recipe::of(&options, &plan);
        warn(model, &plan);
        let error = match recipe.build(gpu, model, on_progress) {
            Ok(executor) => return Ok((plan, recipe, executor)),
            Err(error) => error,
        };
        let is_full = matches!(error, LoadError::Gpu(GpuError::OutOfMemory { .. }));
        let more = more_layers(plan.num_streamed, model.spec().num_layers).filter(|_| is_full && may_stream);
        let Some(more) = more else { return Err(error.into()) };
        tracing::warn!("the adapter's memory is full: {error}");
        options.cpu_offload_bytes = Some(wgpu_executor::weight_sizes(model)?.on_host(more));
        gpu = open_gpu(&options)?;
    }
}

/// A quarter of the layers more, until all are away.
fn more_layers(num_streamed: u32, num_layers: u32) -> Option<u32> {
    let more = (num_streamed + num_layers.div_ceil(4)).min(num_layers);
    (more > num_streamed).then_some(more)
}

fn warn(model: &Model, plan: &EnginePlan) {
    if plan.num_streamed > 0 {
        tracing::warn!(
            "{} of {} layers ({} MiB) are kept in host memory and sent to the adapter at each step, which is slow",
            plan.num_streamed,
            model.spec().num_layers,
            plan.streamed_bytes.div_ceil(1 << 20)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::more_layers;

    #[test]
    fn each_try_keeps_a_quarter_more_away_until_all_are() {
        let tries = std::iter::successors(Some(0), |&n| more_layers(n, 30)).collect::<Vec<_>>();
        assert_eq!(tries, [0, 8, 16, 24, 30]);
        assert_eq!(more_layers(1, 1), None);
    }
}
