//! The models of `kvasir serve`: what each is called, what it needs, and what they may take together.

use super::error::{CliError, CliResult, Exit};
use super::serve::ServeArgs;
use super::{interrupt, out, session};
use crate::config::ConfigFile;
use crate::engine::EngineHandle;
use crate::engine::loader::{self, LoadFailure};
use crate::engine::memory_plan::{self, Machine};
use crate::engine::options::{EngineOptions, LoadRequest, LoraOptions};
use crate::engine::survey::{Survey, survey};
use crate::gpu::Gpu;
use crate::server::{Fleet, FleetLimits, OnDemand};
use std::path::Path;
use std::time::Duration;

/// A request waits so long for the memory of models in use.
const ROOM_TIMEOUT: Duration = Duration::from_secs(30);
const GIB: f64 = (1u64 << 30) as f64;

/// The models, none of them loaded.
pub struct Plan {
    pub fleet: Fleet,
    /// One for each model.
    pub engines: Vec<EngineHandle>,
    /// The load of the first model.
    pub first: LoadRequest,
}

/// Finds the models that the flags name. One that stays loaded is left to its load; others are looked at first.
pub fn plan(args: &ServeArgs, options: EngineOptions, file: &ConfigFile) -> Result<Plan, CliError> {
    let flags = if args.names.is_empty() { &args.models } else { &args.names };
    let mut models = Vec::new();
    for flag in flags {
        let (name, model) = split_name(flag);
        let source = session::source(Some(model), file)?;
        // The adapters are those of the first model.
        let lora = if models.is_empty() { options.lora.clone() } else { LoraOptions::none() };
        models.push((name, LoadRequest { source, options: EngineOptions { lora, ..options.clone() } }));
    }
    if models.is_empty() {
        models.push((None, LoadRequest { source: session::source(None, file)?, options: options.clone() }));
    }
    check(args, &options, models.len())?;
    let first = models[0].1.clone();
    let engines: Vec<EngineHandle> = models.iter().map(|_| EngineHandle::start(options.clone())).collect();
    if let ([(name, _)], None) = (models.as_slice(), args.model_idle_timeout) {
        let names = name.map_or_else(|| args.served_model_name.clone(), |name| vec![name.to_owned()]);
        return Ok(Plan { fleet: Fleet::of_one(engines[0].clone(), names), engines, first });
    }
    let gpu = Gpu::open(&loader::gpu_request(&options)).map_err(LoadFailure::from)?;
    let machine = Machine::with_adapter(gpu.caps().is_cpu, gpu.caps().max_binding_bytes);
    drop(gpu);
    let share = f64::from(options.gpu_memory_utilization);
    let limits = FleetLimits {
        memory_bytes: match args.model_memory {
            Some(gib) => Some((gib * GIB) as u64),
            None => machine.available_bytes.map(|bytes| (bytes as f64 * share) as u64),
        },
        idle_timeout: args.model_idle_timeout.map(Duration::from_secs),
        room_timeout: ROOM_TIMEOUT,
    };
    let mut fleet: Vec<(EngineHandle, Vec<String>, OnDemand)> = Vec::new();
    for ((name, request), engine) in models.into_iter().zip(&engines) {
        let Survey { name: own, bytes, max_model_len } = look_at(&request, machine)?;
        let names = match (name, args.served_model_name.as_slice()) {
            (Some(name), _) => vec![name.to_owned()],
            (None, []) => vec![own],
            (None, names) => names.to_vec(),
        };
        check_room(&names[0], bytes, limits.memory_bytes)?;
        if let Some(twice) = names.iter().find(|name| fleet.iter().any(|(_, known, _)| known.contains(name))) {
            return Err(CliError::usage(format!("two models are called {twice}"))
                .with_fix("give each a name: --model NAME=PATH"));
        }
        out::note(&format!("{} takes {} and a context of {max_model_len} tokens", names[0], out::bytes(bytes)));
        fleet.push((engine.clone(), names, OnDemand { request, bytes, max_model_len }));
    }
    Ok(Plan { fleet: Fleet::on_demand(fleet, limits), engines, first })
}

/// What means nothing for so many models.
fn check(args: &ServeArgs, options: &EngineOptions, num_models: usize) -> CliResult {
    if args.model_memory.is_some_and(|gib| !(gib > 0.0 && gib.is_finite())) {
        return Err(CliError::usage("--model-memory must be above 0"));
    }
    if num_models > 1 && !args.served_model_name.is_empty() {
        return Err(CliError::usage("--served-model-name names one model, and several are given")
            .with_fix("name each where it is given: --model NAME=PATH"));
    }
    let of_one = [
        ("--kv-events-topic", args.kv_events_topic.is_some()),
        ("--kv-events-replay-endpoint", args.kv_events_replay_endpoint.is_some()),
        ("--kv-events-config", args.kv_events_config.is_some()),
        ("--chat-template", options.chat_template.is_some()),
    ];
    if let Some((flag, _)) = of_one.into_iter().find(|(_, is_given)| *is_given && num_models > 1) {
        return Err(CliError::usage(format!("{flag} is for one model, and several are given")));
    }
    if num_models > 1 && options.record.is_some() {
        return Err(CliError::usage("--record records one model, and several are given"));
    }
    Ok(Exit::Ok)
}

fn check_room(name: &str, bytes: u64, limit: Option<u64>) -> CliResult {
    match limit.filter(|&limit| bytes > limit) {
        None => Ok(Exit::Ok),
        Some(limit) => {
            let (needed, limit) = (out::bytes(bytes), out::bytes(limit));
            let message = format!("{name} needs {needed}, and all models together may take {limit}");
            Err(CliError::new(Exit::DoesNotFit, message)
                .with_fix("raise --model-memory, or lower --num-gpu-blocks-override or --max-model-len"))
        }
    }
}

fn look_at(request: &LoadRequest, machine: Machine) -> Result<Survey, CliError> {
    let machine = Machine { available_bytes: machine.available_bytes.and(memory_plan::available_memory()), ..machine };
    let mut progress = session::Progress::default();
    let found = survey(request, machine, &mut |p| {
        progress.show(p.phase, p.done, p.total);
        interrupt::presses() == 0
    });
    progress.clear();
    Ok(found?)
}

/// `NAME=MODEL`, or a model alone; a path that is there is never cut.
fn split_name(flag: &str) -> (Option<&str>, &str) {
    match flag.split_once('=') {
        Some((name, model)) if !name.is_empty() && !Path::new(flag).exists() => (Some(name), model),
        _ => (None, flag),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_before_the_model() {
        assert_eq!(split_name("small=models/a.gguf"), (Some("small"), "models/a.gguf"));
        assert_eq!(split_name("models/a.gguf"), (None, "models/a.gguf"));
        assert_eq!(split_name("=a"), (None, "=a"));
        assert_eq!(split_name("a=b=c"), (Some("a"), "b=c"));
    }

    #[test]
    fn a_model_that_can_never_fit_is_refused_with_both_figures() {
        let refused = check_room("big", 3 << 30, Some(1 << 30)).expect_err("too large");
        assert_eq!(refused.exit, Exit::DoesNotFit);
        assert!(refused.message.contains("big needs"), "{}", refused.message);
        assert!(check_room("big", 3 << 30, None).is_ok());
    }
}
