//! Fewer compute threads while the machine runs on its battery.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use larder_kernels::ThreadPool;
use larder_os::power::PowerSupplies;

use crate::notices::{Notice, Notices};
use crate::options::BatteryOptions;

/// Time between looks at the power supply. A look can take some ten milliseconds where the battery has a slow
/// controller, so a thread of its own does it.
const INTERVAL: Duration = Duration::from_secs(3);

/// A thread that lets a pool use fewer threads while the machine runs on its battery. Dropping it ends the thread.
pub(crate) struct PowerWatch {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PowerWatch {
    /// Looks at the power supply now, and then every few seconds.
    pub fn start(options: &BatteryOptions, pool: &Arc<ThreadPool>, notices: &Notices) -> io::Result<Self> {
        let mut power =
            PowerThreads { options: options.clone(), pool: pool.clone(), notices: notices.clone(), on_battery: false };
        power.look();
        let (end, ended) = channel();
        let watch = move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                power.look();
            }
        };
        let thread = thread::Builder::new().name("larder-power".into()).spawn(watch)?;
        Ok(PowerWatch { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for PowerWatch {
    fn drop(&mut self) {
        drop(self.end.take());
        // A thread that panicked has changed nothing.
        self.thread.take().map(JoinHandle::join);
    }
}

/// The threads of a pool by the power supply.
struct PowerThreads {
    options: BatteryOptions,
    pool: Arc<ThreadPool>,
    notices: Notices,
    on_battery: bool,
}

impl PowerThreads {
    fn look(&mut self) {
        let on_battery = PowerSupplies::read(&self.options.supplies).is_on_battery();
        if on_battery == std::mem::replace(&mut self.on_battery, on_battery) {
            return;
        }
        let all = self.pool.threads();
        let threads = if on_battery { self.options.threads.min(all) } else { all };
        self.pool.use_threads(threads);
        self.notices.send(Notice::Power { on_battery, threads, all });
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use parking_lot::Mutex;

    use super::*;

    /// Writes a file of a supply.
    fn set(root: &Path, supply: &str, file: &str, text: &str) {
        let folder = root.join(supply);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(file), format!("{text}\n")).unwrap();
    }

    #[test]
    fn a_change_of_the_supply_is_said_once_and_changes_the_threads() {
        let root = tempfile::tempdir().unwrap();
        set(root.path(), "AC", "type", "Mains");
        set(root.path(), "AC", "online", "1");
        set(root.path(), "BAT0", "type", "Battery");
        let said = Arc::new(Mutex::new(Vec::new()));
        let theirs = said.clone();
        let notices = Notices::to(move |notice| theirs.lock().push(notice.to_string()));
        let pool = Arc::new(ThreadPool::new(4, false).unwrap());
        let options = BatteryOptions { threads: 2, supplies: root.path().to_owned() };
        let mut power = PowerThreads { options, pool: pool.clone(), notices, on_battery: false };
        let mut look = |online: &str| {
            set(root.path(), "AC", "online", online);
            set(root.path(), "BAT0", "status", "Unknown");
            power.look();
            pool.threads_in_use()
        };
        assert_eq!(["1", "0", "0", "1", "1"].map(&mut look), [4, 2, 2, 4, 4]);
        let expected = ["power: on battery, 2 of 4 compute threads", "power: plugged in, 4 of 4 compute threads"];
        assert_eq!(*said.lock(), expected);
    }
}
