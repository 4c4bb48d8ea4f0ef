//! How long the UI thread works on a frame, and how often it may.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const RING: usize = 512;

/// The latest frame times, in microseconds.
#[derive(Clone, Debug, Default)]
pub struct FrameStats {
    ring: Vec<u64>,
    next: usize,
    count: u64,
}

impl FrameStats {
    pub fn record(&mut self, us: u64) {
        if self.ring.len() < RING {
            self.ring.push(us);
        } else {
            self.ring[self.next] = us;
        }
        self.next = (self.next + 1) % RING;
        self.count += 1;
    }

    /// Frames since the start.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// 95 of 100 of the latest frames took at most this long; `None` before the first.
    pub fn p95_us(&self) -> Option<u64> {
        let mut sorted = self.ring.clone();
        sorted.sort_unstable();
        let last = sorted.len().checked_sub(1)?;
        sorted.get((last * 95).div_ceil(100)).copied()
    }

    pub fn max_us(&self) -> Option<u64> {
        self.ring.iter().max().copied()
    }
}

/// Time that the calling thread has spent on a CPU, where the system tells; else the time that passed. Shared cores make
/// the latter look worse than it is.
pub struct WorkTimer {
    started: Instant,
    cpu_ns: Option<u64>,
}

impl WorkTimer {
    pub fn start() -> Self {
        WorkTimer { started: Instant::now(), cpu_ns: thread_cpu_ns() }
    }

    pub fn elapsed_us(&self) -> u64 {
        match (self.cpu_ns, thread_cpu_ns()) {
            (Some(from), Some(to)) => to.saturating_sub(from) / 1000,
            _ => self.started.elapsed().as_micros() as u64,
        }
    }
}

#[cfg(target_os = "linux")]
fn thread_cpu_ns() -> Option<u64> {
    std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}

#[cfg(not(target_os = "linux"))]
fn thread_cpu_ns() -> Option<u64> {
    None
}

/// Says when the next frame may be drawn, so that news from other threads are shown soon but not more often than makes
/// sense. Input of the user is drawn at once and is not asked here.
pub struct Pacer {
    start: Instant,
    /// Microseconds since `start` before which no frame is due.
    next_us: AtomicU64,
}

/// News are gathered for at least this long.
pub const MIN_INTERVAL: Duration = Duration::from_millis(16);
/// On a software adapter the engine needs the cores more than the window.
const MIN_INTERVAL_CPU: Duration = Duration::from_millis(100);
const FRAMES_APART_CPU: u32 = 4;

/// The least time between two frames that nobody asked for by hand.
pub fn interval(is_cpu_adapter: bool, last_frame: Duration) -> Duration {
    if is_cpu_adapter { MIN_INTERVAL_CPU.max(last_frame * FRAMES_APART_CPU) } else { MIN_INTERVAL }
}

impl Pacer {
    pub fn new() -> Self {
        Pacer { start: Instant::now(), next_us: AtomicU64::new(0) }
    }

    /// A frame was drawn just now; the next one is due after `interval`.
    pub fn frame_drawn(&self, interval: Duration) {
        let now = self.start.elapsed() + interval;
        self.next_us.store(now.as_micros() as u64, Ordering::Relaxed);
    }

    /// How long to wait before the next frame.
    pub fn delay(&self) -> Duration {
        let next = Duration::from_micros(self.next_us.load(Ordering::Relaxed));
        next.saturating_sub(self.start.elapsed()).max(Duration::from_millis(1))
    }
}

impl Default for Pacer {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p95_is_of_the_latest_frames_only() {
        let mut stats = FrameStats::default();
        assert_eq!(stats.p95_us(), None);
        for us in 1..=100 {
            stats.record(us);
        }
        assert_eq!(stats.p95_us(), Some(96));
        for _ in 0..RING {
            stats.record(7);
        }
        assert_eq!((stats.p95_us(), stats.max_us(), stats.count()), (Some(7), Some(7), 100 + RING as u64));
    }

    #[test]
    fn a_software_adapter_is_given_rest_in_proportion_to_its_frames() {
        let ms = Duration::from_millis;
        assert_eq!(interval(false, ms(40)), ms(16));
        assert_eq!(interval(true, ms(5)), ms(100));
        assert_eq!(interval(true, ms(40)), ms(160));
    }

    #[test]
    fn news_wait_until_the_next_frame_is_due() {
        let pacer = Pacer::new();
        assert!(pacer.delay() <= Duration::from_millis(1));
        pacer.frame_drawn(Duration::from_secs(60));
        assert!(pacer.delay() > Duration::from_secs(59));
    }
}
