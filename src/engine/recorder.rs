//! A recording of what the engine does, where one was asked for.

use super::handle::LoadedModel;
use super::options::EngineOptions;
use crate::recording::{AdapterIdentity, Header, Line, LoraIdentity, ModelIdentity, Recorder, TimedOp, VERSION};
use crate::scheduler::Scheduler;
use crate::telemetry::StepRecord;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Starts the recording that the options ask for, and the scheduler's journal with it. A file that cannot be made, or that
/// holds something else, is a warning: the engine runs without.
pub(super) fn start(model: &LoadedModel, options: &EngineOptions, scheduler: &mut Scheduler) -> Option<Recorder> {
    let path = options.record.as_ref()?;
    let recorder = create(path).and_then(|file| Recorder::start(file, header(model, options, scheduler)));
    match recorder {
        Ok(recorder) => {
            scheduler.set_journal(true);
            Some(recorder)
        }
        Err(error) => {
            tracing::warn!("nothing is recorded: {error}: {}", path.display());
            None
        }
    }
}

/// A new file, or one that held a recording. Anything else is the user's and stays.
fn create(path: &Path) -> std::io::Result<File> {
    let mut start = [0; 10];
    match File::open(path) {
        // A device or a pipe has nothing to lose, and may have nothing to read yet.
        Ok(mut file) if file.metadata()?.is_file() => {
            let num_read = file.read(&mut start)?;
            if num_read > 0 && !start.starts_with(b"{\"header\":") {
                return Err(std::io::Error::other("the file is no recording and is left as it is"));
            }
        }
        _ => {}
    }
    File::create(path)
}

fn header(model: &LoadedModel, options: &EngineOptions, scheduler: &Scheduler) -> Header {
    Header {
        version: VERSION,
        kv: scheduler.kv().config(),
        num_host_blocks: scheduler.kv().counts().host.total,
        swap_space_bytes: options.swap_space_bytes,
        scheduler: scheduler.config(),
        model: ModelIdentity {
            name: model.name.clone(),
            arch: model.arch.clone(),
            quant: model.quant.clone(),
            num_params: model.num_params,
            file_bytes: model.file_bytes,
            vocab_size: model.vocab_size,
            eos_token_ids: model.eos_token_ids.clone(),
        },
        adapter: AdapterIdentity {
            name: model.adapter.name.clone(),
            driver: model.adapter.driver.clone(),
            backend: model.adapter.backend.clone(),
        },
        adaptive_budget: options.adaptive_budget,
        precise: options.precise,
        kv_cache_dtype: options.kv_cache_dtype.word().into(),
        floor: options.floor,
        checked_shaders: options.checked_shaders,
        matrix_units: options.matrix_units,
        loras: model
            .loras
            .list()
            .into_iter()
            .map(|lora| LoraIdentity { name: lora.name, path: lora.path, id: lora.id })
            .collect(),
        seed: options.seed,
    }
}

/// Hands over what the scheduler's journal holds, then the record of the step, if one is over.
pub(super) fn write(
    recorder: &mut Option<Recorder>,
    scheduler: &mut Scheduler,
    at_us: u64,
    record: Option<&StepRecord>,
) {
    let Some(open) = recorder else { return };
    let ops = scheduler.take_ops().into_iter();
    let lines = ops.map(|op| Line::Op(Box::new(TimedOp { at_us, op })));
    let mut lines = lines.chain(record.map(|record| Line::Record(Box::new(record.clone()))));
    if !lines.all(|line| open.push(line)) {
        scheduler.set_journal(false);
        *recorder = None;
    }
}
