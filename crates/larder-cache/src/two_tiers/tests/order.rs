//! Tests of order: when the device starts computing, and when the link starts copies.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::cache::ROWS_TOGETHER;
use super::*;

/// The calls in order.
#[derive(Clone, Default)]
struct CallLog(Arc<Mutex<Vec<String>>>);

impl CallLog {
    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock()
    }
}

/// A device that logs when a copy begins.
struct LoggingDevice {
    device: FakeDevice,
    log: CallLog,
}

impl Device for LoggingDevice {
    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<(), DeviceError> {
        self.device.allocate(slots, slot_bytes)
    }

    fn submit(&mut self, transfer: Transfer) {
        self.log.lock().push(format!("copy {}", transfer.direction));
        self.device.submit(transfer);
    }

    fn poll(&mut self) -> Option<TransferDone> {
        self.device.poll()
    }

    fn wait(&mut self) -> Option<TransferDone> {
        self.device.wait()
    }

    fn in_flight(&self) -> usize {
        self.device.in_flight()
    }
}

impl TieredCompute for CallLog {
    fn host(&mut self, _: &ExpertLayout, experts: &[(ExpertId, &[u8])]) -> Option<Duration> {
        let mut log = self.lock();
        log.extend(experts.iter().map(|(expert, _)| format!("{expert} on the host")));
        None
    }

    fn device(&mut self, _: &ExpertLayout, experts: &[(ExpertId, SlotIndex)]) -> Option<Duration> {
        let mut log = self.lock();
        let experts: Vec<String> = experts.iter().map(|(expert, _)| expert.to_string()).collect();
        log.push(format!("{} on the device", experts.join(" and ")));
        None
    }
}

/// A visit of layer 0, each of whose experts was chosen by `tokens` tokens.
fn visit(fixture: &mut Fixture, log: &mut CallLog, experts: &[u16], tokens: usize) {
    let wanted: Vec<_> = experts.iter().map(|id| WantedExpert { expert: ExpertId(*id), tokens }).collect();
    fixture.cache.visit(LayerIdx(0), &wanted, &[], log).unwrap();
}

#[test]
fn experts_on_the_device_are_computed_before_copies_begin() {
    let mut log = CallLog::default();
    let equip = |device| LoggingDevice { device, log: log.clone() };
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 2, 4), COPY, "lru", |m| m, equip).unwrap();
    (0..3).for_each(|expert| fixture.visit(0, &[expert], 1).unwrap());
    log.lock().clear();
    visit(&mut fixture, &mut log, &[0, 2], 1);
    let expected = ["expert 2 on the device", "copy into", "expert 0 on the device"];
    assert_eq!(log.lock()[..], expected.map(String::from));
    assert!(fixture.is_on_device(0, 2), "its slot was not taken for the other expert");
}

#[test]
fn experts_of_few_tokens_are_computed_together_when_the_last_has_come() {
    for (tokens, slots, groups) in [(1, 3, &[1, 3][..]), (ROWS_TOGETHER, 3, &[1, 1, 1, 1]), (1, 2, &[1, 1, 2])] {
        let mut log = CallLog::default();
        let equip = |device| LoggingDevice { device, log: log.clone() };
        let mut fixture = Fixture::with(&shape(CacheScope::Layer, slots, 6), COPY, "lru", |m| m, equip).unwrap();
        (0..6).for_each(|expert| fixture.visit(0, &[expert], 1).unwrap());
        let (there, absent): (Vec<u16>, Vec<u16>) =
            (0..6).partition(|expert| fixture.is_on_device(0, *expert as usize));
        log.lock().clear();
        visit(&mut fixture, &mut log, &[&there[..1], &absent[..3]].concat(), tokens);
        let log = log.lock();
        let computed = log.iter().filter_map(|line| line.strip_suffix(" on the device"));
        let sizes: Vec<usize> = computed.map(|experts| experts.split(" and ").count()).collect();
        assert_eq!(sizes, groups, "{slots} slots, {tokens} tokens: {log:?}");
    }
}
