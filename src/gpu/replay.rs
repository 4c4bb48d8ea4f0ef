//! A recording done: one encoder, one compute pass for each run of dispatches, one submit; results come back through a
//! ring of mapped buffers that is copied to in the same submit. What is expected to be submitted next is encoded while the
//! last submit runs.
//!
//! Waiting loops on timeouts, since some drivers report one at once, and looks for a lost device each time.

mod again;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use super::buffer::BufferSlice;
use super::device::Gpu;
use super::error::GpuError;
use super::recording::{Command, Recording, grid};
use super::streamed::Streamed;
use again::Again;

/// Counters of one submit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubmitStats {
    pub submits: u32,
    pub passes: u32,
    pub dispatches: u32,
    pub readback_bytes: u32,
}

/// A submit that has not been waited for.
#[derive(Debug)]
#[must_use = "its readback buffer is only free again after the wait"]
pub struct InFlight {
    index: wgpu::SubmissionIndex,
    slot: Option<usize>,
    sizes: Vec<u64>,
    timing: Timing,
    /// Shader and label of each dispatch that is timed.
    timed: Vec<(String, String)>,
    stats: SubmitStats,
}

/// What a submit gave back.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// Bytes of each slice that was to be read, in order.
    pub readback: Vec<Vec<u8>>,
    /// Time between start of the first and end of the last pass, where the adapter can tell.
    pub gpu_us: Option<u32>,
    /// Shader, label and microseconds of each dispatch, where they were [to be timed](Replayer::set_profiling).
    pub dispatches: Vec<(String, String, f64)>,
    pub stats: SubmitStats,
}

/// Encodes, submits, reads back. Owned by the one thread that waits.
#[derive(Debug)]
pub struct Replayer {
    slots: Vec<Slot>,
    timer: Option<Timer>,
    is_profiling: bool,
    /// The last submit failed after a part of it had run.
    ran_partly: bool,
    /// `None` where nothing is encoded before it is asked for.
    again: Option<Again>,
    num_prepared: u64,
}

/// A submit that was encoded and not sent.
#[derive(Debug)]
struct Encoded {
    commands: wgpu::CommandBuffer,
    slot: Option<usize>,
    sizes: Vec<u64>,
    timing: Timing,
    timed: Vec<(String, String)>,
    stats: SubmitStats,
}

impl Encoded {
    /// Of everything that comes back.
    fn bytes(&self) -> u64 {
        self.sizes.iter().sum::<u64>() + self.timing.bytes()
    }
}

/// Which timestamps a submit writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timing {
    None,
    /// At the start of the first pass and the end of the last.
    Passes,
    /// At both ends of this many dispatches, each in a pass of its own.
    Dispatches(u32),
}

impl Timing {
    fn num_stamps(self) -> u32 {
        match self {
            Timing::None => 0,
            Timing::Passes => 2,
            Timing::Dispatches(n) => 2 * n,
        }
    }

    fn bytes(self) -> u64 {
        u64::from(self.num_stamps()) * STAMP_BYTES
    }
}

#[derive(Debug)]
struct Slot {
    buffer: wgpu::Buffer,
    is_used: bool,
    map_state: Arc<AtomicU8>,
}

/// Timestamps at pass boundaries.
#[derive(Debug)]
struct Timer {
    num_stamps: u32,
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    ns_per_tick: f32,
}

const STAMP_BYTES: u64 = 8;
/// Dispatches of a step that can be timed; each takes two timestamps.
const MAX_TIMED: u32 = wgpu::QUERY_SET_MAX_QUERIES / 2;
const MAP_PENDING: u8 = 0;
const MAP_DONE: u8 = 1;
const MAP_FAILED: u8 = 2;

/// How long one look at the fence blocks.
const POLL: Duration = Duration::from_millis(250);
/// A step that takes this long is taken for a hung driver. A long prompt on a slow software adapter needs a minute.
const HUNG: Duration = Duration::from_secs(600);

impl Replayer {
    pub fn new(gpu: &Gpu) -> Replayer {
        let timer = gpu.caps.has_timestamps.then(|| Timer::new(gpu, 2));
        let again = Some(Again::new());
        Replayer { slots: Vec::new(), timer, is_profiling: false, ran_partly: false, again, num_prepared: 0 }
    }

    /// Whether submits from now on time each of their dispatches. False where the adapter has no timestamps.
    pub fn set_profiling(&mut self, on: bool) -> bool {
        self.is_profiling = on && self.timer.is_some();
        self.is_profiling
    }

    /// Whether submits that are expected are encoded before they are asked for; they are from the start.
    pub fn set_preparing(&mut self, on: bool) {
        if let Some(encoded) = self.again.take().and_then(|mut again| again.drop_encoded()) {
            self.give_back(encoded.slot);
        }
        self.again = on.then(Again::new);
    }

    /// Submits so far that were encoded before they were asked for.
    pub fn num_prepared(&self) -> u64 {
        self.num_prepared
    }

    /// Encodes the submit that is expected next: for the time while one runs.
    pub fn prepare(&mut self, gpu: &Gpu) {
        let Some((recording, readback)) = self.again.as_ref().and_then(Again::expected) else { return };
        let (recording, readback) = (recording.clone(), readback.to_vec());
        let timing = self.timing(gpu, recording.num_dispatches());
        // A fault shows again, and is told, when the same is submitted.
        if let (Ok(encoded), Some(again)) = (self.encode(gpu, &recording, &readback, timing), &mut self.again) {
            again.keep(encoded);
        }
    }

    /// What the next submit times. More dispatches than can be timed are not timed one by one.
    fn timing(&mut self, gpu: &Gpu, num_dispatches: u32) -> Timing {
        let Some(timer) = &mut self.timer else { return Timing::None };
        let timing = match num_dispatches {
            0 => Timing::None,
            n if self.is_profiling && n <= MAX_TIMED => Timing::Dispatches(n),
            _ => Timing::Passes,
        };
        if timer.num_stamps < timing.num_stamps() {
            *timer = Timer::new(gpu, timing.num_stamps());
        }
        timing
    }

    /// Whether the last submit failed with an error after a part of it had run.
    pub fn ran_partly(&self) -> bool {
        self.ran_partly
    }

    /// Encodes the recording, then copies the slices to be read back, in one submit; in several where content is loaded
    /// from host memory ([`Command::Load`]), and then all but the last have run when this returns.
    pub fn submit(&mut self, gpu: &Gpu, recording: &Recording, readback: &[BufferSlice]) -> Result<InFlight, GpuError> {
        self.ran_partly = false;
        let content = |command: &Command| match command {
            Command::Load { content } => Some(content.clone()),
            _ => None,
        };
        let contents: Vec<Arc<Streamed>> = recording.commands.iter().filter_map(content).collect();
        if contents.is_empty() {
            let timing = self.timing(gpu, recording.num_dispatches());
            let encoded = match self.again.as_mut().map(|again| again.take(recording, readback, timing)) {
                Some(Ok(encoded)) => {
                    self.num_prepared += 1;
                    encoded
                }
                other => {
                    if let Some(Err(Some(in_vain))) = other {
                        self.give_back(in_vain.slot);
                    }
                    self.encode(gpu, recording, readback, timing)?
                }
            };
            return self.send(gpu, &recording.label, encoded);
        }
        let part = |commands: &[Command]| Recording { label: recording.label.clone(), commands: commands.to_vec() };
        let mut parts = recording.commands.split(|command| content(command).is_some());
        let mut running = VecDeque::new();
        let mut num_submits = 1;
        for (content, commands) in contents.iter().zip(&mut parts) {
            running.push_back(self.submit_one(gpu, &part(commands), &[], Timing::None)?);
            self.ran_partly = true;
            num_submits += 1;
            // What is staged is held until it was copied: of two contents at most.
            if running.len() > 1 {
                running.pop_front().map(|oldest| self.wait(gpu, oldest)).transpose()?;
            }
            content.stage(gpu);
        }
        let mut last = self.submit_one(gpu, &part(parts.next().unwrap_or_default()), readback, Timing::None)?;
        for part in running {
            self.wait(gpu, part)?;
        }
        self.ran_partly = false;
        last.stats = SubmitStats { submits: num_submits, dispatches: recording.num_dispatches(), ..last.stats };
        Ok(last)
    }

    /// As [`Replayer::submit`], in several submits: the commands up to each of these ends. None of them is waited for.
    pub fn submit_in(
        &mut self,
        gpu: &Gpu,
        recording: &Recording,
        readback: &[BufferSlice],
        ends: &[usize],
    ) -> Result<InFlight, GpuError> {
        let has_loads = recording.commands.iter().any(|command| matches!(command, Command::Load { .. }));
        let (Some((_, ends)), false) = (ends.split_last().filter(|(_, before)| !before.is_empty()), has_loads) else {
            return self.submit(gpu, recording, readback);
        };
        self.ran_partly = false;
        let part = |from: usize, to: usize| {
            let label = recording.label.clone();
            Recording { label, commands: recording.commands[from..to].to_vec() }
        };
        let mut from = 0;
        let mut num_passes = 0;
        for &end in ends {
            // Done before the last one is: nobody waits for it.
            num_passes += self.submit_one(gpu, &part(from, end), &[], Timing::None)?.stats.passes;
            self.ran_partly = true;
            from = end;
        }
        let mut last = self.submit_one(gpu, &part(from, recording.commands.len()), readback, Timing::None)?;
        self.ran_partly = false;
        last.stats.submits += ends.len() as u32;
        last.stats.passes += num_passes;
        last.stats.dispatches = recording.num_dispatches();
        Ok(last)
    }

    /// One encoder, one submit.
    fn submit_one(
        &mut self,
        gpu: &Gpu,
        recording: &Recording,
        readback: &[BufferSlice],
        timing: Timing,
    ) -> Result<InFlight, GpuError> {
        let encoded = self.encode(gpu, recording, readback, timing)?;
        self.send(gpu, &recording.label, encoded)
    }

    fn encode(
        &mut self,
        gpu: &Gpu,
        recording: &Recording,
        readback: &[BufferSlice],
        timing: Timing,
    ) -> Result<Encoded, GpuError> {
        for command in &recording.commands {
            if let Command::Dispatch { bound, .. } = command {
                gpu.pipeline(&bound.kernel)?;
            }
        }
        let sizes: Vec<u64> = readback.iter().map(|s| s.size.next_multiple_of(4)).collect();
        let num_dispatches = recording.num_dispatches();
        let bytes: u64 = sizes.iter().sum::<u64>() + timing.bytes();
        let slot = if bytes > 0 { Some(self.free_slot(gpu, bytes)?) } else { None };
        let timer = self.timer.as_ref().map(|timer| (timer, timing));
        let target = slot.map(|idx| self.slots[idx].buffer.clone());

        let encoded = gpu.scoped(&recording.label, 0, || {
            let mut encoder =
                gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some(&recording.label) });
            let passes = encode(&mut encoder, recording, timer);
            if let Some(target) = &target {
                encode_readback(&mut encoder, readback, timer, target);
            }
            (encoder.finish(), passes)
        });
        let (commands, passes) = encoded.inspect_err(|_| self.give_back(slot))?;
        let stats = SubmitStats {
            submits: 1,
            passes,
            dispatches: num_dispatches,
            readback_bytes: (bytes - timing.bytes()) as u32,
        };
        let timed = if matches!(timing, Timing::Dispatches(_)) { names(recording) } else { Vec::new() };
        Ok(Encoded { commands, slot, sizes, timing, timed, stats })
    }

    fn send(&mut self, gpu: &Gpu, label: &str, encoded: Encoded) -> Result<InFlight, GpuError> {
        let bytes = encoded.bytes();
        let Encoded { commands, slot, sizes, timing, timed, stats } = encoded;
        let index = gpu.scoped(label, 0, || {
            let _turn = gpu.take_turn();
            gpu.queue.submit([commands])
        })?;
        if let Some(idx) = slot {
            self.slots[idx].map(bytes);
        }
        Ok(InFlight { index, slot, sizes, timing, timed, stats })
    }

    /// Frees what a submit that is not sent would have written to.
    fn give_back(&mut self, slot: Option<usize>) {
        if let Some(idx) = slot {
            self.slots[idx].is_used = false;
        }
    }

    /// Waits for a submit and takes its results.
    pub fn wait(&mut self, gpu: &Gpu, in_flight: InFlight) -> Result<Finished, GpuError> {
        wait_for(gpu, Some(in_flight.index))?;
        let mut finished = Finished { stats: in_flight.stats, ..Finished::default() };
        if let Some(idx) = in_flight.slot {
            let payload = in_flight.sizes.iter().sum::<u64>();
            let bytes = self.slots[idx].take(gpu, payload + in_flight.timing.bytes())?;
            let mut start = 0;
            for size in &in_flight.sizes {
                let end = start + *size as usize;
                finished.readback.push(bytes[start..end].to_vec());
                start = end;
            }
            if let (Some(timer), true) = (&self.timer, in_flight.timing != Timing::None) {
                let stamps = &bytes[start..];
                let last = in_flight.timing.num_stamps() as usize - 1;
                finished.gpu_us = Some(timer.micros(stamps, 0, last) as u32);
                let times = in_flight.timed.into_iter().enumerate();
                finished.dispatches =
                    times.map(|(i, (name, label))| (name, label, timer.micros(stamps, 2 * i, 2 * i + 1))).collect();
            }
        }
        Ok(finished)
    }

    /// A slot of at least `bytes` that nobody waits for; allocated when there is none.
    fn free_slot(&mut self, gpu: &Gpu, bytes: u64) -> Result<usize, GpuError> {
        let found = self.slots.iter().position(|s| !s.is_used && s.buffer.size() >= bytes);
        let idx = match found {
            Some(idx) => idx,
            None => {
                // Too small slots that are idle would never be used again.
                let small = self.slots.iter().position(|s| !s.is_used);
                let slot = Slot::new(gpu, bytes.next_power_of_two().max(4096))?;
                match small {
                    Some(idx) => {
                        self.slots[idx] = slot;
                        idx
                    }
                    None => {
                        self.slots.push(slot);
                        self.slots.len() - 1
                    }
                }
            }
        };
        self.slots[idx].is_used = true;
        Ok(idx)
    }
}

impl Slot {
    fn new(gpu: &Gpu, size: u64) -> Result<Slot, GpuError> {
        let desc = wgpu::BufferDescriptor {
            label: Some("readback"),
            size,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        };
        let buffer = gpu.scoped("readback", size, || gpu.device.create_buffer(&desc))?;
        Ok(Slot { buffer, is_used: false, map_state: Arc::default() })
    }

    fn map(&mut self, bytes: u64) {
        self.map_state = Arc::new(AtomicU8::new(MAP_PENDING));
        let state = self.map_state.clone();
        self.buffer.slice(..bytes).map_async(wgpu::MapMode::Read, move |result| {
            state.store(if result.is_ok() { MAP_DONE } else { MAP_FAILED }, Ordering::Release);
        });
    }

    /// The mapped bytes; the slot is free afterwards.
    fn take(&mut self, gpu: &Gpu, bytes: u64) -> Result<Vec<u8>, GpuError> {
        let started = Instant::now();
        while self.map_state.load(Ordering::Acquire) == MAP_PENDING {
            gpu.check()?;
            if started.elapsed() > HUNG {
                return Err(GpuError::Lost("a finished buffer was not mapped".into()));
            }
            // The callback runs in a poll that sees the fence; an error of the poll shows in the map state.
            let _turn = gpu.take_turn();
            let _ = gpu.device.poll(wgpu::PollType::Poll);
        }
        gpu.check()?;
        if self.map_state.load(Ordering::Acquire) == MAP_FAILED {
            return Err(GpuError::Lost("results could not be mapped".into()));
        }
        let data = self
            .buffer
            .slice(..bytes)
            .get_mapped_range()
            .map(|view| view.to_vec())
            .map_err(|e| GpuError::validation("readback", e.to_string()))?;
        self.buffer.unmap();
        self.is_used = false;
        Ok(data)
    }
}

impl Timer {
    fn new(gpu: &Gpu, num_stamps: u32) -> Timer {
        let queries = gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("pass times"),
            ty: wgpu::QueryType::Timestamp,
            count: num_stamps,
        });
        let resolved = gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("pass times"),
            size: u64::from(num_stamps) * STAMP_BYTES,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        Timer { num_stamps, queries, resolved, ns_per_tick: gpu.queue.get_timestamp_period() }
    }

    /// Between two of the stamps in `bytes`.
    fn micros(&self, bytes: &[u8], from: usize, to: usize) -> f64 {
        let stamp = |idx: usize| bytes.get(8 * idx..8 * idx + 8).and_then(|b| b.try_into().ok());
        let tick = |idx: usize| stamp(idx).map_or(0, u64::from_le_bytes);
        tick(to).saturating_sub(tick(from)) as f64 * f64::from(self.ns_per_tick) / 1000.0
    }

    /// What the pass with this index, out of so many, writes.
    fn writes(&self, timing: Timing, pass: u32, num_passes: u32) -> Option<wgpu::ComputePassTimestampWrites<'_>> {
        let (begin, end) = match timing {
            Timing::None => (None, None),
            Timing::Passes => ((pass == 0).then_some(0), (pass + 1 == num_passes).then_some(1)),
            Timing::Dispatches(_) => (Some(2 * pass), Some(2 * pass + 1)),
        };
        // A pass in the middle writes no timestamp, and wgpu wants such a pass to have no query set.
        (begin.is_some() || end.is_some()).then_some(wgpu::ComputePassTimestampWrites {
            query_set: &self.queries,
            beginning_of_pass_write_index: begin,
            end_of_pass_write_index: end,
        })
    }
}

/// Shader and label of each dispatch.
fn names(recording: &Recording) -> Vec<(String, String)> {
    let name = |command: &Command| match command {
        Command::Dispatch { label, bound, .. } => Some((bound.kernel.name.clone(), label.to_string())),
        Command::Copy { .. } | Command::Clear { .. } | Command::Load { .. } => None,
    };
    recording.commands.iter().filter_map(name).collect()
}

/// Encodes all commands; gives the number of passes.
fn encode(encoder: &mut wgpu::CommandEncoder, recording: &Recording, timer: Option<(&Timer, Timing)>) -> u32 {
    let is_dispatch = |c: &Command| matches!(c, Command::Dispatch { .. });
    let is_alone = timer.is_some_and(|(_, timing)| matches!(timing, Timing::Dispatches(_)));
    let is_one_run = |a: &Command, b: &Command| is_dispatch(a) && is_dispatch(b) && !is_alone;
    let runs: Vec<&[Command]> = recording.commands.chunk_by(is_one_run).collect();
    let num_passes = runs.iter().filter(|run| is_dispatch(&run[0])).count() as u32;
    let mut pass_idx = 0;
    for run in runs {
        match &run[0] {
            Command::Copy { from, to } => {
                encode_copy(encoder, from, to);
            }
            Command::Clear { slice } => {
                encoder.clear_buffer(slice.buffer.raw(), slice.offset, Some(slice.size));
            }
            // Submits are cut there.
            Command::Load { .. } => {}
            Command::Dispatch { .. } => {
                let writes = timer.and_then(|(timer, timing)| timer.writes(timing, pass_idx, num_passes));
                encode_pass(encoder, run, writes);
                pass_idx += 1;
            }
        }
    }
    num_passes
}

fn encode_copy(encoder: &mut wgpu::CommandEncoder, from: &BufferSlice, to: &BufferSlice) {
    match (from.buffer.texels(), to.buffer.texels()) {
        (None, Some(line)) => {
            line.copy_line_in(encoder, (from.buffer.raw(), from.offset), (to.offset, from.size));
        }
        (Some(line), _) => {
            line.copy_line_out(encoder, (from.offset, from.size), (to.buffer.raw(), to.offset));
        }
        (None, None) => {
            encoder.copy_buffer_to_buffer(from.buffer.raw(), from.offset, to.buffer.raw(), to.offset, Some(from.size));
        }
    }
}

fn encode_pass(
    encoder: &mut wgpu::CommandEncoder,
    dispatches: &[Command],
    timestamp_writes: Option<wgpu::ComputePassTimestampWrites<'_>>,
) {
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: None, timestamp_writes });
    let mut last: Option<*const super::Kernel> = None;
    for command in dispatches {
        let Command::Dispatch { bound, workgroups, .. } = command else { continue };
        let kernel = Arc::as_ptr(&bound.kernel);
        if last != Some(kernel) {
            pass.set_pipeline(bound.kernel.made().expect("waited for before anything is encoded"));
            last = Some(kernel);
        }
        pass.set_bind_group(0, &bound.group, &[]);
        let [x, y, z] = grid(*workgroups);
        pass.dispatch_workgroups(x, y, z);
    }
}

fn encode_readback(
    encoder: &mut wgpu::CommandEncoder,
    readback: &[BufferSlice],
    timer: Option<(&Timer, Timing)>,
    target: &wgpu::Buffer,
) {
    let mut offset = 0;
    for slice in readback {
        let size = slice.size.next_multiple_of(4);
        match slice.buffer.texels() {
            Some(line) => line.copy_line_out(encoder, (slice.offset, size), (target, offset)),
            None => encoder.copy_buffer_to_buffer(slice.buffer.raw(), slice.offset, target, offset, Some(size)),
        }
        offset += size;
    }
    if let Some((timer, timing)) = timer.filter(|(_, timing)| *timing != Timing::None) {
        encoder.resolve_query_set(&timer.queries, 0..timing.num_stamps(), &timer.resolved, 0);
        encoder.copy_buffer_to_buffer(&timer.resolved, 0, target, offset, Some(timing.bytes()));
    }
}

/// Blocks until a submit (or all of them) is done, the device is lost, or the driver hangs.
pub(super) fn wait_for(gpu: &Gpu, index: Option<wgpu::SubmissionIndex>) -> Result<(), GpuError> {
    let started = Instant::now();
    loop {
        gpu.check()?;
        let poll = wgpu::PollType::Wait { submission_index: index.clone(), timeout: Some(POLL) };
        let polled = {
            let _turn = gpu.take_turn();
            gpu.device.poll(poll)
        };
        match polled {
            Ok(_) => return gpu.check(),
            Err(wgpu::PollError::Timeout) if started.elapsed() < HUNG => {}
            Err(wgpu::PollError::Timeout) => {
                return Err(GpuError::Lost(format!("the driver has not answered for {} s", HUNG.as_secs())));
            }
            Err(other) => return Err(GpuError::validation("wait", other.to_string())),
        }
    }
}
