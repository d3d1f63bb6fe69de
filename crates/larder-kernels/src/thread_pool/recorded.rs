//! How long a run would take on other threads than there are: its tasks, recorded on one thread, and the fork-joins
//! simulated with threads of stated speeds.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::shared::WAKES;

/// What a run did: its fork-joins in their order, each with what one thread did before it.
#[derive(Clone, Default, Debug)]
pub struct RecordedRun {
    /// The fork-joins.
    pub fork_joins: Vec<RecordedForkJoin>,
    /// What one thread did behind the last of them.
    pub after: Duration,
}

/// A fork-join.
#[derive(Clone, Default, Debug)]
pub struct RecordedForkJoin {
    /// What one thread did before it.
    pub before: Duration,
    /// Its tasks, in the order in which they are claimed.
    pub tasks: Vec<Duration>,
}

/// What it costs to give a task to a thread.
#[derive(Clone, Copy, Debug)]
pub struct WakeCosts {
    /// How long threads wait for the next fork-join before they sleep.
    pub spin: Duration,
    /// Time of the thread that wakes another.
    pub call: Duration,
    /// Time from there until the other works.
    pub latency: Duration,
    /// How many others each thread wakes; [`usize::MAX`] if the caller wakes all.
    pub wakes: usize,
}

impl Default for WakeCosts {
    /// A wake-up takes its caller 2 µs, measured on Linux, and the thread that wakes up the 20 that are the reason to
    /// spin. As many as this pool's threads wake.
    fn default() -> Self {
        let [call, latency] = [2, 20].map(Duration::from_micros);
        WakeCosts { spin: super::shared::SPIN, call, latency, wakes: WAKES }
    }
}

/// A run on simulated threads.
#[derive(Clone, Copy, Default, Debug)]
pub struct SimulatedRun {
    /// From its start to its end.
    pub time: Duration,
    /// Part of that in which one thread worked, and there was nothing to do for the others.
    pub alone: Duration,
    /// Work of all threads, as long as it takes a thread of speed 1.
    pub work: Duration,
}

impl SimulatedRun {
    /// The share of what threads of these speeds could have done in this time that they did.
    pub fn efficiency(&self, speeds: &[f64]) -> f64 {
        self.work.as_secs_f64() / (self.time.as_secs_f64() * speeds.iter().sum::<f64>()).max(f64::MIN_POSITIVE)
    }
}

impl RecordedRun {
    /// The same run, recorded again: each time becomes the shorter of the two, so that what other machines on the same
    /// processor took from one of them does not count. None if the tasks are others.
    pub fn shorter(mut self, again: &RecordedRun) -> Option<RecordedRun> {
        let same = |own: &RecordedForkJoin, other: &RecordedForkJoin| own.tasks.len() == other.tasks.len();
        let all_same = self.fork_joins.iter().zip(&again.fork_joins).all(|(own, other)| same(own, other));
        if self.fork_joins.len() != again.fork_joins.len() || !all_same {
            return None;
        }
        for (own, other) in self.fork_joins.iter_mut().zip(&again.fork_joins) {
            own.before = own.before.min(other.before);
            own.tasks.iter_mut().zip(&other.tasks).for_each(|(own, other)| *own = (*own).min(*other));
        }
        self.after = self.after.min(again.after);
        Some(self)
    }

    /// The run on threads of these speeds, where 1 is that of the recording; the first is the caller's. Tasks are
    /// claimed one by one.
    pub fn on(&self, speeds: &[f64], costs: &WakeCosts) -> SimulatedRun {
        let mut run = SimulatedRun::default();
        for RecordedForkJoin { before, tasks } in &self.fork_joins {
            let before_task = before.div_f64(speeds[0]);
            let asleep = before_task > costs.spin;
            run.alone += before_task;
            run.time += before_task + joined(tasks, speeds, asleep.then_some(costs));
            run.work += *before + tasks.iter().sum::<Duration>();
        }
        run.alone += self.after.div_f64(speeds[0]);
        run.time += self.after.div_f64(speeds[0]);
        run.work += self.after;
        run
    }
}

/// The time of a fork-join. `costs` if all threads but the caller's sleep.
fn joined(tasks: &[Duration], speeds: &[f64], costs: Option<&WakeCosts>) -> Duration {
    // When each thread can claim its next task.
    let mut free: BinaryHeap<Reverse<(Duration, usize)>> = BinaryHeap::new();
    match costs {
        Some(costs) => free.extend(awake(speeds.len().min(tasks.len()), costs).into_iter().zip(0..).map(Reverse)),
        None => free.extend((0..speeds.len()).map(|thread| Reverse((Duration::ZERO, thread)))),
    }
    let mut end = Duration::ZERO;
    for task in tasks {
        let Reverse((at, thread)) = free.pop().expect("there is a thread");
        let done = at + task.div_f64(speeds[thread]);
        end = end.max(done);
        free.push(Reverse((done, thread)));
    }
    end
}

/// When each of some threads, the first of which wakes others, has woken those that it wakes and can work.
fn awake(threads: usize, costs: &WakeCosts) -> Vec<Duration> {
    let mut ready = vec![Duration::ZERO; threads];
    let (mut waker, mut next) = (0, 1);
    while next < threads {
        for woken in next..threads.min(next.saturating_add(costs.wakes)) {
            ready[waker] += costs.call;
            ready[woken] = ready[waker] + costs.latency;
        }
        next = next.saturating_add(costs.wakes);
        waker += 1;
    }
    ready
}

/// The time that this thread has computed so far, so that other programs do not count; elsewhere than on Linux the time
/// of the day.
fn processor_time() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()
}

/// Records the fork-joins of a pool that has one thread.
pub struct TaskRecorder {
    run: RecordedRun,
    last: Duration,
    /// What one look at the clock takes.
    clock: Duration,
}

impl TaskRecorder {
    pub fn new() -> Self {
        let mut recorder = TaskRecorder { run: RecordedRun::default(), last: processor_time(), clock: Duration::ZERO };
        recorder.clock = (0..100).map(|_| recorder.lap()).min().unwrap_or_default();
        recorder
    }

    /// Executes the tasks of a fork-join.
    pub fn run(&mut self, tasks: usize, task: &dyn Fn(usize)) {
        let before = self.lap();
        let tasks = (0..tasks).map(|number| {
            task(number);
            self.lap()
        });
        let tasks = tasks.collect();
        self.run.fork_joins.push(RecordedForkJoin { before, tasks });
        // What the recording itself took is left out.
        self.last = processor_time();
    }

    fn lap(&mut self) -> Duration {
        let now = processor_time();
        now.saturating_sub(std::mem::replace(&mut self.last, now)).saturating_sub(self.clock)
    }

    /// The run since the last call.
    pub fn take(&mut self) -> RecordedRun {
        let after = self.lap();
        RecordedRun { after, ..std::mem::take(&mut self.run) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROS: fn(u64) -> Duration = Duration::from_micros;

    fn run(before: u64, tasks: &[u64]) -> RecordedRun {
        let tasks = tasks.iter().copied().map(MICROS).collect();
        RecordedRun { fork_joins: vec![RecordedForkJoin { before: MICROS(before), tasks }], after: MICROS(10) }
    }

    #[test]
    fn tasks_are_claimed_by_free_threads() {
        let costs = WakeCosts::default();
        let on = |run: &RecordedRun, speeds: &[f64]| run.on(speeds, &costs).time;
        let even = run(10, &[100; 8]);
        for (threads, time) in [(1, 820), (2, 420), (4, 220), (8, 120), (16, 120)] {
            assert_eq!(on(&even, &vec![1.0; threads]), MICROS(time), "{threads} threads");
        }
        // A core of half the speed takes one task of three.
        assert_eq!(on(&run(0, &[100; 3]), &[1.0, 0.5]), MICROS(210));
        // The longest task comes last: all others wait for it.
        assert_eq!(on(&run(0, &[100, 100, 400]), &[1.0, 1.0]), MICROS(510));
        let alone = even.on(&[1.0; 4], &costs);
        assert_eq!((alone.alone, alone.work), (MICROS(20), MICROS(820)));
        assert!((alone.efficiency(&[1.0; 4]) - 820.0 / 880.0).abs() < 1e-9);
    }

    #[test]
    fn sleepers_are_woken_by_those_that_were_woken() {
        let costs = |wakes| WakeCosts { wakes, ..WakeCosts::default() };
        // The caller wakes two, and the first of these two more as soon as it is awake itself.
        assert_eq!(awake(5, &costs(2)), [4, 26, 24, 44, 46].map(MICROS));
        assert_eq!(awake(5, &costs(usize::MAX)), [8, 22, 24, 26, 28].map(MICROS));
        let time = |wakes, threads| run(60, &vec![200; threads]).on(&vec![1.0; threads], &costs(wakes)).time;
        assert!(time(WAKES, 32) < time(usize::MAX, 32), "a tree wakes 31 threads earlier than one thread");
        assert!(time(WAKES, 4) <= time(usize::MAX, 4));
    }

    #[test]
    fn of_two_recordings_each_time_is_the_shorter() {
        let shorter = run(7, &[3, 9]).shorter(&run(8, &[5, 2])).unwrap();
        assert_eq!(
            (shorter.fork_joins[0].before, &shorter.fork_joins[0].tasks[..]),
            (MICROS(7), &[3, 2].map(MICROS)[..])
        );
        assert!(run(7, &[3, 9]).shorter(&run(7, &[3])).is_none());
        assert!(run(7, &[3]).shorter(&RecordedRun::default()).is_none());
    }

    #[test]
    fn what_a_pool_does_is_recorded() {
        let mut recorder = TaskRecorder::new();
        let done = std::cell::Cell::new(0);
        for tasks in [3, 5] {
            recorder.run(tasks, &|task| done.set(done.get() + task));
        }
        let run = recorder.take();
        assert_eq!(run.fork_joins.iter().map(|f| f.tasks.len()).collect::<Vec<_>>(), [3, 5]);
        assert_eq!(done.get(), 3 + 10);
        assert!(recorder.take().fork_joins.is_empty());
    }
}
