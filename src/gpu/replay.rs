//! A recording done: one encoder, one compute pass for each run of dispatches, one submit; results come back through a
//! ring of mapped buffers that is copied to in the same submit.
//!
//! Waiting loops on timeouts, since some drivers report one at once, and looks for a lost device each time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use super::buffer::BufferSlice;
use super::device::Gpu;
use super::error::GpuError;
use super::recording::{Command, Recording, grid};

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
    is_timed: bool,
    stats: SubmitStats,
}

/// What a submit gave back.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// Bytes of each slice that was to be read, in order.
    pub readback: Vec<Vec<u8>>,
    /// Time between start of the first and end of the last pass, where the adapter can tell.
    pub gpu_us: Option<u32>,
    pub stats: SubmitStats,
}

/// Encodes, submits, reads back. Owned by the one thread that waits.
#[derive(Debug)]
pub struct Replayer {
    slots: Vec<Slot>,
    timer: Option<Timer>,
}

#[derive(Debug)]
struct Slot {
    buffer: wgpu::Buffer,
    is_used: bool,
    map_state: Arc<AtomicU8>,
}

/// Two timestamps at pass boundaries.
#[derive(Debug)]
struct Timer {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    ns_per_tick: f32,
}

const TIMER_BYTES: u64 = 16;
const MAP_PENDING: u8 = 0;
const MAP_DONE: u8 = 1;
const MAP_FAILED: u8 = 2;

/// How long one look at the fence blocks.
const POLL: Duration = Duration::from_millis(250);
/// A step that takes this long is taken for a hung driver. A long prompt on a slow software adapter needs a minute.
const HUNG: Duration = Duration::from_secs(600);

impl Replayer {
    pub fn new(gpu: &Gpu) -> Replayer {
        Replayer { slots: Vec::new(), timer: gpu.caps.has_timestamps.then(|| Timer::new(gpu)) }
    }

    /// Encodes the recording, then copies the slices to be read back, in one submit.
    pub fn submit(&mut self, gpu: &Gpu, recording: &Recording, readback: &[BufferSlice]) -> Result<InFlight, GpuError> {
        let sizes: Vec<u64> = readback.iter().map(|s| s.size.next_multiple_of(4)).collect();
        let num_dispatches = recording.num_dispatches();
        let is_timed = self.timer.is_some() && num_dispatches > 0;
        let timer_bytes = if is_timed { TIMER_BYTES } else { 0 };
        let bytes: u64 = sizes.iter().sum::<u64>() + timer_bytes;
        let slot = if bytes > 0 { Some(self.free_slot(gpu, bytes)?) } else { None };
        let timer = self.timer.as_ref().filter(|_| is_timed);
        let target = slot.map(|idx| self.slots[idx].buffer.clone());

        let (index, passes) = gpu.scoped(&recording.label, 0, || {
            let mut encoder =
                gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some(&recording.label) });
            let passes = encode(&mut encoder, recording, timer);
            if let Some(target) = &target {
                encode_readback(&mut encoder, readback, timer, target);
            }
            (gpu.queue.submit([encoder.finish()]), passes)
        })?;
        if let Some(idx) = slot {
            self.slots[idx].map(bytes);
        }
        let stats = SubmitStats {
            submits: 1,
            passes,
            dispatches: num_dispatches,
            readback_bytes: (bytes - timer_bytes) as u32,
        };
        Ok(InFlight { index, slot, sizes, is_timed, stats })
    }

    /// Waits for a submit and takes its results.
    pub fn wait(&mut self, gpu: &Gpu, in_flight: InFlight) -> Result<Finished, GpuError> {
        wait_for(gpu, Some(in_flight.index))?;
        let mut finished = Finished { stats: in_flight.stats, ..Finished::default() };
        if let Some(idx) = in_flight.slot {
            let bytes = self.slots[idx].take(gpu, in_flight.sizes.iter().sum::<u64>(), in_flight.is_timed)?;
            let mut start = 0;
            for size in &in_flight.sizes {
                let end = start + *size as usize;
                finished.readback.push(bytes[start..end].to_vec());
                start = end;
            }
            if let (true, Some(timer)) = (in_flight.is_timed, &self.timer) {
                finished.gpu_us = Some(timer.micros(&bytes[start..]));
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
    fn take(&mut self, gpu: &Gpu, payload: u64, is_timed: bool) -> Result<Vec<u8>, GpuError> {
        let bytes = payload + if is_timed { TIMER_BYTES } else { 0 };
        let started = Instant::now();
        while self.map_state.load(Ordering::Acquire) == MAP_PENDING {
            gpu.check()?;
            if started.elapsed() > HUNG {
                return Err(GpuError::Lost("a finished buffer was not mapped".into()));
            }
            // The callback runs in a poll that sees the fence; an error of the poll shows in the map state.
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
    fn new(gpu: &Gpu) -> Timer {
        let queries = gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("pass times"),
            ty: wgpu::QueryType::Timestamp,
            count: 2,
        });
        let resolved = gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("pass times"),
            size: TIMER_BYTES,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        Timer { queries, resolved, ns_per_tick: gpu.queue.get_timestamp_period() }
    }

    fn micros(&self, bytes: &[u8]) -> u32 {
        let tick = |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
        let ticks = tick(8).saturating_sub(tick(0));
        (ticks as f64 * f64::from(self.ns_per_tick) / 1000.0) as u32
    }
}

/// Encodes all commands; gives the number of passes.
fn encode(encoder: &mut wgpu::CommandEncoder, recording: &Recording, timer: Option<&Timer>) -> u32 {
    let is_dispatch = |c: &Command| matches!(c, Command::Dispatch { .. });
    let runs: Vec<&[Command]> = recording.commands.chunk_by(|a, b| is_dispatch(a) && is_dispatch(b)).collect();
    let num_passes = runs.iter().filter(|run| is_dispatch(&run[0])).count() as u32;
    let mut pass_idx = 0;
    for run in runs {
        match &run[0] {
            Command::Copy { from, to } => {
                encoder.copy_buffer_to_buffer(
                    from.buffer.raw(),
                    from.offset,
                    to.buffer.raw(),
                    to.offset,
                    Some(from.size),
                );
            }
            Command::Clear { slice } => {
                encoder.clear_buffer(slice.buffer.raw(), slice.offset, Some(slice.size));
            }
            Command::Dispatch { .. } => {
                let timestamp_writes = timer.map(|timer| wgpu::ComputePassTimestampWrites {
                    query_set: &timer.queries,
                    beginning_of_pass_write_index: (pass_idx == 0).then_some(0),
                    end_of_pass_write_index: (pass_idx + 1 == num_passes).then_some(1),
                });
                // A pass in the middle writes no timestamp, and wgpu wants such a pass to have no query set.
                let timestamp_writes = timestamp_writes.filter(|_| pass_idx == 0 || pass_idx + 1 == num_passes);
                encode_pass(encoder, run, timestamp_writes);
                pass_idx += 1;
            }
        }
    }
    num_passes
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
            pass.set_pipeline(&bound.kernel.pipeline);
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
    timer: Option<&Timer>,
    target: &wgpu::Buffer,
) {
    let mut offset = 0;
    for slice in readback {
        let size = slice.size.next_multiple_of(4);
        encoder.copy_buffer_to_buffer(slice.buffer.raw(), slice.offset, target, offset, Some(size));
        offset += size;
    }
    if let Some(timer) = timer {
        encoder.resolve_query_set(&timer.queries, 0..2, &timer.resolved, 0);
        encoder.copy_buffer_to_buffer(&timer.resolved, 0, target, offset, Some(TIMER_BYTES));
    }
}

/// Blocks until a submit (or all of them) is done, the device is lost, or the driver hangs.
pub(super) fn wait_for(gpu: &Gpu, index: Option<wgpu::SubmissionIndex>) -> Result<(), GpuError> {
    let started = Instant::now();
    loop {
        gpu.check()?;
        let poll = wgpu::PollType::Wait { submission_index: index.clone(), timeout: Some(POLL) };
        match gpu.device.poll(poll) {
            Ok(_) => return gpu.check(),
            Err(wgpu::PollError::Timeout) if started.elapsed() < HUNG => {}
            Err(wgpu::PollError::Timeout) => {
                return Err(GpuError::Lost(format!("the driver has not answered for {} s", HUNG.as_secs())));
            }
            Err(other) => return Err(GpuError::validation("wait", other.to_string())),
        }
    }
}
