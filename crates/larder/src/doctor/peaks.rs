//! `larder doctor --peaks`: the most that the processor and its memory do in a second, for each number of threads.

use anyhow::{Context, Result};
use larder_kernels::{Peak, ThreadPool, memory_bandwidth};
use serde_json::{Value, json};

use super::processor;
use crate::print;

/// Version of the JSON format.
const FORMAT: &str = "larder-peaks-1";

/// The rates with one, two, four, … and all threads.
struct Measured {
    threads: Vec<usize>,
    rows: Vec<Row>,
}

/// The rates of one kind of work.
struct Row {
    name: &'static str,
    /// The unit of the rates, as in GFLOP/s.
    unit: &'static str,
    instructions: Option<&'static str>,
    /// Per second, for each number of threads; none if the processor cannot do it.
    rates: Vec<f64>,
}

/// Measures and prints.
pub fn run(as_json: bool) -> Result<()> {
    let all = std::thread::available_parallelism().map_or(1, |n| n.get());
    let measured = Measured::measure(thread_counts(all))?;
    if as_json {
        println!("{}", measured.json());
        return Ok(());
    }
    println!("{}", processor::name().unwrap_or_else(|| std::env::consts::ARCH.to_owned()));
    print!("{}", print::table(&measured.table()));
    println!("\nThe best of many calls of milliseconds; a multiply-add of two numbers is two operations.");
    Ok(())
}

/// The powers of two up to `all`, and `all`.
fn thread_counts(all: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |count| Some(2 * count));
    powers.take_while(|count| *count < all).chain([all]).collect()
}

impl Measured {
    fn measure(threads: Vec<usize>) -> Result<Self> {
        let pool = |count: &usize| ThreadPool::new(*count, false).context("no threads for the measurement of peaks");
        let pools = threads.iter().map(pool).collect::<Result<Vec<_>>>()?;
        let of_peak = |peak: &Peak| Row {
            name: peak.name,
            unit: peak.unit,
            instructions: peak.instructions(),
            rates: pools.iter().filter_map(|pool| peak.rate(pool)).collect(),
        };
        let mut rows: Vec<Row> = Peak::all().iter().map(of_peak).collect();
        let rates = pools.iter().map(memory_bandwidth).collect();
        rows.push(Row { name: "memory read", unit: "B", instructions: None, rates });
        Ok(Measured { threads, rows })
    }

    fn json(&self) -> Value {
        let row = |row: &Row| json!({"name": row.name, "instructions": row.instructions, "unit": row.unit, "per_second": row.rates});
        let rows: Vec<Value> = self.rows.iter().map(row).collect();
        json!({"format": FORMAT, "processor": processor::name(), "threads": self.threads, "peaks": rows})
    }

    fn table(&self) -> Vec<Vec<String>> {
        let heads = self.threads.iter().map(|count| print::count(*count, "thread", "threads"));
        let head = [String::new()].into_iter().chain(heads).collect();
        [head].into_iter().chain(self.rows.iter().map(Row::cells)).collect()
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let name = self.instructions.map_or(self.name.to_owned(), |of| format!("{}, {of}", self.name));
        let rate = |rate: &f64| format!("{:.1} G{}/s", rate / 1e9, self.unit);
        let none = self.rates.is_empty().then(|| "not here".to_owned());
        [name].into_iter().chain(none).chain(self.rates.iter().map(rate)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_doubled_up_to_all() {
        for (all, wanted) in [(1, &[1][..]), (2, &[1, 2]), (6, &[1, 2, 4, 6]), (8, &[1, 2, 4, 8])] {
            assert_eq!(thread_counts(all), wanted);
        }
    }

    #[test]
    fn the_table_has_a_column_for_each_number_of_threads_and_says_what_is_not_here() {
        let row = |name, instructions, rates| Row { name, unit: "OP", instructions, rates };
        let rows = vec![row("bytes", Some("VNNI"), vec![8e11, 1.5e12]), row("tiles", None, vec![])];
        let table = print::table(&Measured { threads: vec![1, 2], rows }.table());
        let wanted = "                1 thread    2 threads\n\
                      bytes, VNNI  800.0 GOP/s  1500.0 GOP/s\n\
                      tiles           not here\n";
        assert_eq!(table.split_whitespace().collect::<Vec<_>>(), wanted.split_whitespace().collect::<Vec<_>>());
    }
}
