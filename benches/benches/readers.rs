//! The readers against each other on the same work: rates and processor time of direct reads, by size and by how many
//! are in flight.
//!
//! `cargo bench -p larder-benches --bench readers [-- FOLDER]` makes 4 GiB of files in FOLDER (which should be on the
//! SSD that is to be measured; without it, in the build folder), reads them, and deletes them. The first lines are the
//! raw measurements, the table at the end has the medians.
//!
//! Processor time is that of the process with all its threads, in and outside the kernel, so what io_uring does in
//! threads of its own is in it. What the system does on nobody's behalf, such as interrupts, is not.

use std::{
    collections::VecDeque,
    error::Error,
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use larder_store::{
    DATA_START,
    reader::{Arena, ReadRequest, Reader, ReaderSpec, ShardFiles, Slot},
};
use rustix::time::{ClockId, clock_gettime};

const READERS: [ReaderSpec; 2] = [ReaderSpec::URING, ReaderSpec::PREAD];
const READ_BYTES: [usize; 4] = [512 << 10, 1 << 20, 2 << 20, 4 << 20];
const IN_FLIGHT: [usize; 4] = [1, 2, 8, 16];
const RUNS: usize = 3;
/// The largest read, which is what each file holds.
const DATA_BYTES: usize = 4 << 20;
const FILES: usize = 1024;
/// Bytes per measurement.
const MEASURED_BYTES: usize = 1 << 30;

/// What one measurement, or the median of several, gave.
#[derive(Clone, Copy)]
struct Cost {
    gb_per_s: f64,
    cpu_s_per_gb: f64,
}

/// A line of the table: what each reader's reads cost, in the order of [`READERS`].
struct Row {
    read_bytes: usize,
    in_flight: usize,
    costs: Vec<Cost>,
}

/// The files, each with a shard's header and as many bytes as the largest read, and what was read of them so far.
struct Work {
    files: Arc<ShardFiles>,
    reads: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    // Whoever builds all benchmarks to test them does not mean to fill the disk.
    let args: Vec<String> = std::env::args().skip(1).collect();
    if !args.iter().any(|arg| arg == "--bench") {
        return Ok(());
    }
    let folder = args.iter().find(|arg| !arg.starts_with('-')).map_or(env!("CARGO_TARGET_TMPDIR"), String::as_str);
    let dir = tempfile::tempdir_in(folder)?;
    eprintln!("{} files of {} MiB in {}", FILES, DATA_BYTES >> 20, dir.path().display());
    (0..FILES).try_for_each(|file| write_random(&path(dir.path(), file), file as u64))?;

    let folder = dir.path().to_owned();
    let files = ShardFiles::new(FILES, move |file| (path(&folder, file), (DATA_START + DATA_BYTES) as u64))?;
    let files = Arc::new(files);
    for reader in READERS {
        eprintln!("{}", reader.open_unpaced(&files, &Arena::new(1, DATA_BYTES)?.0)?.1);
    }
    let mut work = Work { files, reads: 0 };
    let rows = measure_all(&mut work)?;
    print_table(&rows);
    Ok(())
}

fn path(folder: &Path, file: usize) -> PathBuf {
    folder.join(file.to_string())
}

/// Bytes that nothing on the way to the SSD can compress or find twice: xorshift.
fn write_random(path: &Path, seed: u64) -> std::io::Result<()> {
    let mut random = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut bytes = vec![0; DATA_START + DATA_BYTES];
    for word in bytes.chunks_exact_mut(8) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        word.copy_from_slice(&random.to_le_bytes());
    }
    let mut file = File::create(path)?;
    file.write_all(&bytes)?;
    file.sync_all()
}

/// The medians, by size and depth. The readers take turns, so that what disturbs one disturbs the other.
fn measure_all(work: &mut Work) -> Result<Vec<Row>, Box<dyn Error>> {
    println!("reader,read_bytes,in_flight,gb_per_s,cpu_s_per_gb");
    let mut rows = vec![];
    for read_bytes in READ_BYTES {
        for in_flight in IN_FLIGHT {
            let mut costs = READERS.map(|_| vec![]);
            for _ in 0..RUNS {
                for (reader, costs) in READERS.iter().zip(&mut costs) {
                    let cost = work.measure(reader, read_bytes, in_flight)?;
                    println!("{reader},{read_bytes},{in_flight},{:.3},{:.4}", cost.gb_per_s, cost.cpu_s_per_gb);
                    costs.push(cost);
                }
            }
            let costs = costs.iter().map(|costs| median(costs)).collect();
            rows.push(Row { read_bytes, in_flight, costs });
        }
    }
    Ok(rows)
}

impl Work {
    fn measure(&mut self, reader: &ReaderSpec, len: usize, in_flight: usize) -> Result<Cost, Box<dyn Error>> {
        let (arena, mut slots) = Arena::new(in_flight, len)?;
        // The memory is there before the clock runs.
        slots.iter_mut().for_each(|slot| slot.fill(0));
        let (mut reader, _) = reader.open_unpaced(&self.files, &arena)?;
        let (start, cpu) = (Instant::now(), cpu_seconds());
        self.read(&mut *reader, &mut slots, len, MEASURED_BYTES / len)?;
        let (cpu, wall) = (cpu_seconds() - cpu, start.elapsed().as_secs_f64());
        let gb = MEASURED_BYTES as f64 / 1e9;
        Ok(Cost { gb_per_s: gb / wall, cpu_s_per_gb: cpu / gb })
    }

    /// Reads `count` times `len` bytes, always as many at once as there are slots.
    fn read(
        &mut self,
        reader: &mut dyn Reader,
        slots: &mut Vec<Slot>,
        len: usize,
        count: usize,
    ) -> Result<(), Box<dyn Error>> {
        let mut waiting = VecDeque::new();
        let mut left = count;
        loop {
            while left > 0
                && let Some(slot) = slots.pop()
            {
                waiting.push_back(self.next(slot, len));
                left -= 1;
            }
            reader.submit(&mut waiting);
            let Some(done) = reader.wait() else { return Ok(()) };
            done.result?;
            slots.push(done.slot);
        }
    }

    /// A read of the next place: file after file in an order that jumps about, and in each another part every time.
    fn next(&mut self, slot: Slot, len: usize) -> ReadRequest {
        // Odd, so it visits all of a power of two.
        let shard = self.reads * 389 % FILES;
        let part = self.reads / FILES % (DATA_BYTES / len);
        self.reads += 1;
        ReadRequest { shard, offset: (DATA_START + part * len) as u64, len, slot, tag: 0 }
    }
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn median(costs: &[Cost]) -> Cost {
    let middle = |of: fn(&Cost) -> f64| {
        let mut values: Vec<f64> = costs.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Cost { gb_per_s: middle(|cost| cost.gb_per_s), cpu_s_per_gb: middle(|cost| cost.cpu_s_per_gb) }
}

fn print_table(rows: &[Row]) {
    let columns: Vec<_> = READERS.iter().map(|name| format!(" {name} GB/s | {name} CPU s/GB |")).collect();
    println!("\n| read MiB | in flight |{}", columns.concat());
    println!("|---|---|{}", "---|---|".repeat(READERS.len()));
    for Row { read_bytes, in_flight, costs } in rows {
        let cells: Vec<_> = costs.iter().map(|c| format!(" {:.2} | {:.3} |", c.gb_per_s, c.cpu_s_per_gb)).collect();
        println!("| {} | {in_flight} |{}", *read_bytes as f64 / f64::from(1 << 20), cells.concat());
    }
}
